"""Exceptions that users see: one clear line each, and the exit code that goes with it."""

from collections.abc import Iterable


class HeadpoolError(Exception):
    """Something failed that could have worked (disk full, a crashed child): exit code 1."""

    exit_code = 1


class RequestError(HeadpoolError):
    """What was asked for is impossible, or the input is not what it claims to be: exit code 2."""

    exit_code = 2


class Interrupted(HeadpoolError):  # noqa: N818 - nothing is wrong with the work
    """Signal `number` stopped work that can be continued, and the message says how: exit code 128 + number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


def first_line(error: BaseException) -> str:
    """What an exception of another library says, short enough for a message of ours."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """The end of a message about a word that is not known: those that are near it, nothing where none is."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=most)
    return f"; did you mean {' or '.join(near)}?" if near else ""
