"""Where a dataset's rows are: in the user's folder, else in LongBench's own archive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from zipfile import Path as ZipPath

from huggingface_hub import hf_hub_download

from criticalkv.services.evaluation.case import ENVIRONMENT, data_folder
from criticalkv.shared.errors import ConfigError

REPOSITORY = "THUDM/LongBench"
# The last one that changed data or their loader.
REVISION = "f72191f71cd6fcd0da8a54f0915078efda579449"
ARCHIVE = "data.zip"


class Source:
    """Finds files of rows.

    Attributes:
        data: folder of data files; None: as the environment says.
        online: whether the archive may be fetched; what the Hub's cache has is read anyway.
    """

    def __init__(self, data: Path | None, online: bool) -> None:
        self.data, self.online = data, online

    def files(self, tasks: Sequence[str]) -> dict[str, Path | ZipPath]:
        """Return each task's file of JSON lines.

        Raises:
            ConfigError: naming all files that are missing, or several that could be meant.
        """
        folder = data_folder(self.data)
        local = {task: _in_folder(task, folder) if folder else None for task in tasks}
        absent = [task for task, path in local.items() if path is None]
        fetched = self._in_archive(absent) if absent else {}
        return {task: path or fetched[task] for task, path in local.items()}

    def _in_archive(self, tasks: Sequence[str]) -> dict[str, ZipPath]:
        try:
            folder = ZipPath(self._fetch()) / "data"
        except Exception as error:  # the Hub's client raises those of its HTTP library too
            raise _missing(tasks, f"{type(error).__name__}: {error}") from error
        files = {task: folder / f"{task}.jsonl" for task in tasks}
        absent = [task for task, path in files.items() if not path.is_file()]
        if absent:
            raise _missing(absent, "they are not in it")
        return files

    def _fetch(self) -> str:
        """Return the path of the archive, 114 MB, in the Hub's cache."""
        return hf_hub_download(
            REPOSITORY,
            ARCHIVE,
            repo_type="dataset",
            revision=REVISION,
            local_files_only=not self.online,
        )


def _in_folder(task: str, folder: Path) -> Path | None:
    """Return "TASK.jsonl", else the only "TASK_….jsonl", such as "TASK_50.jsonl"."""
    whole = folder / f"{task}.jsonl"
    if whole.is_file():
        return whole
    # TASK_e is another selection of rows, LongBench-E.
    parts = sorted(p for p in folder.glob(f"{task}_*.jsonl") if p.stem != f"{task}_e")
    if len(parts) > 1:
        names = ", ".join(path.name for path in parts)
        raise ConfigError(f"{names}: which one is {task}.jsonl? Rename it", param="data")
    return parts[0] if parts else None


def _missing(tasks: Sequence[str], reason: str) -> ConfigError:
    names = ", ".join(f"{task}.jsonl" for task in tasks)
    return ConfigError(
        f"put {names} into the data folder (--data, {ENVIRONMENT}); Hugging Face has them in "
        f"{REPOSITORY}'s {ARCHIVE}, which cannot be read from there now: {reason[:300]}",
        param="data",
    )
