"""A hub on the loopback: what huggingface_hub's client asks of the real one, with Xet switched off, kept in memory.

    with hub.serve() as served:
        served.client(monkeypatch, tmp_path)        # the client in this process
        subprocess.run(..., env=os.environ | served.environment(tmp_path))
        served.fail("/api/models/me/model/commit/", status=500, times=2)

It keeps repositories with branches and commits, objects of large files, pull requests; refuses what has no token, and
checks a card's metadata as far as tests need it. `asked` tells what was asked for, `received` which contents came.
Not spoken: Xet, multipart uploads, anything but models.
"""

import contextlib
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

from hub_http import Handler
from hub_state import TOKEN, USER, Commit, Hub, Repository

__all__ = ["TOKEN", "USER", "Commit", "Hub", "Repository", "serve"]


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """A hub that listens while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
