"""Models on the hub: one commit at a time, and one clear line for whatever its client raises."""

import errno
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from headpool import headers
from headpool.errors import HeadpoolError, RequestError

ATTEMPTS = 4
"""How often the hub is asked where it fails, with WAIT seconds after the first time, which double."""

WAIT = 1.0

T = TypeVar("T")


def patiently(ask: Callable[[], T], attempts: int = ATTEMPTS) -> T:
    """What `ask` returns, asked again while the hub answers that it failed (5xx). Whatever else is raised passes."""
    for attempt in range(1, attempts):
        try:
            return ask()
        except Exception as error:
            if (status_of(error) or 0) < 500:
                raise
        time.sleep(WAIT * 2 ** (attempt - 1))
    return ask()


def status_of(error: BaseException | None) -> int | None:
    """The status of the hub's answer that an exception of its client is about, None where there was none."""
    from huggingface_hub import errors

    while error is not None:
        response = getattr(error, "response", None) if isinstance(error, errors.HfHubHTTPError) else None
        if response is not None:
            return int(response.status_code)
        error = error.__cause__
    return None


@contextmanager
def hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """Translate the client's exceptions; NotASafetensorsRepoError passes.

    Raises RequestError for a model, revision or file that is not to be had, HeadpoolError when the disk fills up.
    """
    from huggingface_hub import errors

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries are no news to a user
    try:
        yield
    except (errors.NotASafetensorsRepoError, HeadpoolError):
        raise
    except errors.GatedRepoError as error:
        raise RequestError(f"{model} is gated: accept its licence on its page and log in (hf auth login)") from error
    except errors.RemoteEntryNotFoundError as error:
        raise RequestError(f"{model}: no config.json") from error
    except errors.RevisionNotFoundError as error:
        raise RequestError(f"{model} has no revision {revision!r}") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise RequestError(f"no such directory, and no such model on the hub: {model}") from error
    except Exception as error:  # the client's HTTP library, of either generation, raises errors of its own
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HeadpoolError(f"the disk filled up while {model} was downloaded") from error
        raise RequestError(f"no such directory, and the hub cannot be reached: {model}") from error


def download(model: str, revision: str | None, patterns: tuple[str, ...], *, weights: bool) -> Path:
    """The directory of one commit of a model with the files that match; with `weights` also its weight files.

    All of them are of the commit that `revision` names at the first look. Safetensors are preferred to pickles; of
    sharded ones only those are fetched that the index names.
    """
    from huggingface_hub import snapshot_download

    def fetch(commit: str | None, *wanted: str) -> Path:
        return Path(patiently(lambda: snapshot_download(model, revision=commit, allow_patterns=list(wanted))))

    with hub_errors(model, revision):
        directory = fetch(revision, "config.json", *patterns)
        commit = directory.name
        if weights:
            for single, index in headers.WEIGHT_FILES:
                fetch(commit, single, index)
                if (directory / index).is_file():
                    fetch(commit, *set(headers.read_index(directory / index).values()))
                if (directory / single).is_file() or (directory / index).is_file():
                    break
    return directory
