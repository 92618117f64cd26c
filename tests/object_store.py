"""An S3 server on the loopback, and a connection to it that can be slow, frozen or closed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator


class Proxy:
    """Passes connections to a server on, at most `bytes_per_second` from the client if that is set.

    Attributes:
        frozen: nothing passes while it is set.
    """

    def __init__(self, port: int):
        self.target, self.frozen, self.bytes_per_second = port, threading.Event(), 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                for one, other, counts in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass, args=(one, other, counts), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                while self.frozen.is_set():
                    time.sleep(0.02)
                if counts and self.bytes_per_second:
                    time.sleep(len(data) / self.bytes_per_second)
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Refuse connections from now on."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def s3_server(bucket: str) -> Iterator[int]:
    """The port of a server with one bucket."""
    import boto3
    import requests
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        url = f"http://127.0.0.1:{port}"
        requests.post(f"{url}/moto-api/reset", timeout=10)  # its buckets are those of the process
        keys = {f"aws_{key}": value for key, value in KEYS.items()}
        boto3.client("s3", **keys, endpoint_url=url, region_name="us-east-1").create_bucket(Bucket=bucket)
        s3fs.S3FileSystem.clear_instance_cache()  # connections to the server before
        yield port
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()


KEYS = {"access_key_id": "key", "secret_access_key": "secret"}


def environment(port: int) -> dict[str, str]:
    """The variables with which s3fs finds the server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEYS["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": KEYS["secret_access_key"],
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
