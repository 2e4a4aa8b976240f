"""Object stores for tests: fsspec's memory, a local S3 server if its package is there, and files that are objects."""

import contextlib
import importlib.util
import os
import uuid

import fsspec
from fsspec.implementations.local import LocalFileSystem

from fullshard.state.storage import object_path

HAS_S3 = all(importlib.util.find_spec(name) for name in ("s3fs", "moto", "flask"))


class ObjectFiles(LocalFileSystem):
    """Files that behave as objects: one appears complete when it is closed, or not at all.

    Attributes:
        before: Called with the name of each operation that changes something, before it and in the middle of it.
    """

    protocol = "objectfiles"
    before = staticmethod(lambda name: None)

    def pipe_file(self, path, value, mode="overwrite", **options):
        path = self._strip_protocol(path)
        self.before("put")
        self.makedirs(os.path.dirname(path), exist_ok=True)
        part = f"{path}.incoming-{uuid.uuid4().hex}"
        with open(part, "wb") as file:
            file.write(value)
        self.before("put-half")
        if mode == "create":
            try:
                os.link(part, path)
            finally:
                os.unlink(part)
        else:
            os.replace(part, path)

    def _open(self, path, mode="rb", block_size=None, **options):
        if "w" not in mode:
            return super()._open(path, mode, block_size, **options)
        self.before("upload")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return _Upload(self, path)

    def rm_file(self, path):
        self.before("delete")
        os.unlink(self._strip_protocol(path))

    def find(self, path, **options):
        found = super().find(path, **options)
        return {key: value for key, value in found.items() if ".incoming-" not in key}


class _Upload:
    """Parts of an upload, which appear together."""

    def __init__(self, files, path):
        self._files, self._path, self.closed = files, path, False
        self._part = f"{path}.incoming-{uuid.uuid4().hex}"
        self._file = open(self._part, "wb")  # noqa: SIM115 (it outlives this function)

    def write(self, data):
        self._files.before("part")
        return self._file.write(data)

    def close(self):
        if not self.closed:
            self.closed = True
            self._files.before("complete")
            self._file.close()
            os.replace(self._part, self._path)

    def discard(self):
        self._file.close()
        os.unlink(self._part)


fsspec.register_implementation("objectfiles", ObjectFiles, clobber=True)


@contextlib.contextmanager
def memory():
    """Yield the URL of an empty prefix in fsspec's memory."""
    url = f"memory://bucket{uuid.uuid4().hex[:8]}/run"
    yield url
    fsspec.filesystem("memory").store.clear()


@contextlib.contextmanager
def s3(monkeypatch):
    """Start a local S3 server in a thread; yield the URL of an empty prefix in a bucket of it."""
    import boto3  # noqa: PLC0415 (only where the packages are installed)
    from moto import backends  # noqa: PLC0415
    from moto.server import ThreadedMotoServer  # noqa: PLC0415

    # The server lists its modules' 200 directories for each request: most of the time that it took.
    modules = list(backends.list_of_moto_modules())
    monkeypatch.setattr(backends, "list_of_moto_modules", lambda: modules)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    object_path._file_system.cache_clear()
    # The server keeps its objects in this process, for the next server too: a lock left by a test was waited for.
    bucket = f"bucket{uuid.uuid4().hex[:8]}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    try:
        yield f"s3://{bucket}/run"
    finally:
        object_path._file_system.cache_clear()
        server.stop()
