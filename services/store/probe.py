"""Whether the store on this machine serves: `python -m criticalkv.services.store.probe FILE`.

For probes that run beside the store, in its container: with TLS, a certificate and a token,
which probes of other kinds do not have. Exit status 0 if it serves, 1 if not.
"""

from __future__ import annotations

import sys

from criticalkv.shared.config import StoreConfig, load_config
from criticalkv.shared.errors import CriticalKVError
from criticalkv.shared.store_client import StoreClient

TIMEOUT_S = 5.0


def serves(config: StoreConfig) -> bool:
    """Ask the store of this configuration, at this machine's own address.

    Raises:
        ConfigError: if a file that the configuration names cannot be read.
    """
    here = config.model_copy(update={"address": _here(config.address)})
    with StoreClient.of(here, TIMEOUT_S) as client:
        return client.healthy()


def _here(address: str) -> str:
    if address.startswith("unix"):
        return address
    return f"localhost:{address.rpartition(':')[2]}"


def main(file: str) -> int:
    """Return the exit status for a configuration file; say what is wrong with one."""
    try:
        return 0 if serves(load_config(file).store) else 1
    except CriticalKVError as error:
        print(error.message, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
