"""A directory that appears complete, by a rename, or not at all."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from headpool.errors import HeadpoolError, RequestError


def check_destination(out: Path, *, overwrite: bool, source: Path | None = None) -> None:
    """Refuse a destination that would harm something: RequestError says what. Nothing is written.

    It may not exist unless `overwrite`, may not be `source`, lie inside it or hold it.
    """
    target = out.resolve()
    if source is not None:
        origin = source.resolve()
        if target == origin or origin in target.parents or target in origin.parents:
            raise RequestError(f"{out} and the source {source} lie inside one another; choose another destination")
    if target == Path.cwd() or target in Path.cwd().parents:
        raise RequestError(f"{out} is the current directory, or holds it; choose another destination")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise RequestError(f"{out} exists and is no directory")
    if out.exists() and not overwrite:
        raise RequestError(f"{out} exists; choose another destination or pass --overwrite")
    parent = _nearest_existing(target.parent)
    if not parent.is_dir():
        raise RequestError(f"{out} cannot be written: {parent} is no directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RequestError(f"{parent} is not writable")


def check_space(out: Path, needed: int) -> None:
    """Refuse, before a byte is written, a destination whose file system has less than `needed` bytes free."""
    free = shutil.disk_usage(_nearest_existing(out.resolve().parent)).free
    if free < needed:
        raise RequestError(f"{out} needs {needed / 2**30:.2f} GiB, the disk has {free / 2**30:.2f} GiB free")


@contextlib.contextmanager
def staged(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """A hidden directory beside `out` to write into; it becomes `out` when the block ends well, or is removed.

    One writer at a time: a second one is refused while the first lives (a lock that dies with its process), and what a
    killed one left is cleared. Everything is on the disk before the rename. Raises RequestError where nothing can be
    written and HeadpoolError when the disk fills up.
    """
    target = out.resolve()
    staging, replaced = (target.parent / f".{target.name}.{state}" for state in ("partial", "replaced"))
    created = [one for one in (target.parent, *target.parent.parents) if not one.exists()]
    lock = None
    try:
        with reporting_os_errors(out):
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = _claim(staging, out)
            if replaced.exists() and not target.exists():  # killed between the two renames: it was not replaced yet
                replaced.rename(target)
            yield staging
            _sync_tree(staging)
            _publish(staging, target, replaced, overwrite=overwrite)
    except BaseException:
        with contextlib.suppress(OSError, RequestError):
            lock = lock if lock is not None else _claim(staging, out)
            shutil.rmtree(staging)
        for directory in created:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _claim(staging: Path, out: Path) -> int:
    """Make the staging directory empty and ours; returns the open, locked descriptor."""
    lock = None
    try:
        while lock is None or not _is_same(lock, staging):  # another process may have renamed what was locked
            staging.mkdir(exist_ok=True)
            if lock is not None:
                os.close(lock)
            lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for entry in staging.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except BaseException as error:
        if lock is not None:
            os.close(lock)
        if isinstance(error, BlockingIOError):
            raise RequestError(f"another process is writing {out}") from None
        raise
    return lock


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _publish(staging: Path, target: Path, replaced: Path, *, overwrite: bool) -> None:
    """Rename; what is replaced is set aside first, and put back when that fails."""
    if target.exists() and not overwrite:
        raise RequestError(f"{target} appeared while it was being written; pass --overwrite to replace it")
    shutil.rmtree(replaced, ignore_errors=True)
    try:
        if target.exists():
            target.rename(replaced)
        staging.rename(target)
    except BaseException:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise
    sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _nearest_existing(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())


def _sync_tree(root: Path) -> None:
    for path in [*root.rglob("*"), root]:
        sync(path)


def sync(path: Path) -> None:
    """Have what a file or directory holds on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path, busy: str) -> Iterator[None]:
    """Hold a folder, made where it is not there, as the only process; the lock dies with it.

    Raises RequestError: `busy`, while another process holds it, and where it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RequestError(f"{folder} cannot be written ({error.strerror})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(busy) from None
    else:
        yield
    finally:
        os.close(lock)


_REFUSALS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.EISDIR,
)  # fmt: skip


@contextlib.contextmanager
def reporting_os_errors(out: Path) -> Iterator[None]:
    """Turn the operating system's refusals into the one line that a user needs."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise HeadpoolError(
                f"the disk filled up while writing {out}; what there was before is untouched"
            ) from error
        if error.errno in _REFUSALS:
            raise RequestError(f"{out} cannot be written ({error.strerror}: {error.filename})") from error
        raise HeadpoolError(f"writing {out} failed: {error}") from error
