"""The gateway and the store read policies; neither may load torch for it."""

import subprocess
import sys


def test_policies_need_no_torch() -> None:
    code = "import sys, criticalkv.shared.eviction.policy; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
