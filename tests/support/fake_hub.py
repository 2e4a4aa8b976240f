"""A small Hugging Face Hub on this machine: repositories, LFS objects, commits; it can be told to fail."""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_" + "fakeTokenOfTheTestsOnly0123456789"


class Repository:
    """Files by name, as of the newest commit, and the commits before."""

    def __init__(self, *, private):
        self.private = private
        self.commits = [("0" * 40, {".gitattributes": b"*.safetensors filter=lfs\n"})]

    @property
    def head(self):
        return self.commits[-1][0]

    @property
    def files(self):
        return self.commits[-1][1]


class FakeHub:
    """The state behind the endpoint; ``before(method, path, count)`` may answer a request in the Hub's place."""

    def __init__(self):
        self.repositories = {}
        self.objects = {}  # sha256 -> bytes
        self.requests = []  # (method, path, authorization)
        self.sent = []  # sha256 of each large file whose body arrived completely
        self.before = lambda request, count: False
        self.part = lambda received, total: None
        self.lock = threading.RLock()
        self.url = ""

    def files(self, repo):
        """Files of a repository without the Hub's own; None if there is none."""
        one = self.repositories.get(repo)
        return None if one is None else {name: body for name, body in one.files.items() if name != ".gitattributes"}


class Handler(BaseHTTPRequestHandler):
    """Answers for ``hub``, which a subclass has."""

    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._answer()

    do_POST = do_PUT = do_HEAD = do_GET

    def reply(self, status, values=None, **headers):
        body = json.dumps(values if values is not None else {}).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def cut(self):
        """Reset the connection, as a network does that goes away."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
                self.hub.part(sum(map(len, parts)), None)
            self.rfile.readline()
            return b"".join(parts)
        left = total = int(self.headers.get("Content-Length") or 0)
        parts = []
        while left:
            part = self.rfile.read(min(left, 1 << 16))
            if not part:
                raise ConnectionError("the client is gone")
            parts.append(part)
            left -= len(part)
            if self.command == "PUT":
                self.hub.part(total - left, total)
        return b"".join(parts)

    def _answer(self):
        with self.hub.lock:
            self.hub.requests.append((self.command, self.path, self.headers.get("Authorization")))
            count = len(self.hub.requests)
        if self.hub.before(self, count):
            return
        try:
            body = self.body()
        except (ConnectionError, OSError):
            self.close_connection = True
            return
        with self.hub.lock:
            self._serve(self.path.partition("?")[0], body)

    def _serve(self, path, body):
        if path.startswith("/lfs/"):
            digest = hashlib.sha256(body).hexdigest()
            if digest != path.removeprefix("/lfs/"):
                return self.reply(400, {"error": "wrong content"})
            self.hub.objects[digest] = body
            self.hub.sent.append(digest)
            return self.reply(200)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply(401, {"error": "Invalid username or password."})
        if path == "/api/validate-yaml":
            return self.reply(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/preupload/main|/commit/main|/revision/main|)", path):
            return self._model(match[1], match[2], body)
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._batch(json.loads(body))
        return self.reply(404, {"error": f"no such page: {path}"})

    def _create(self, wanted):
        repo = f"{wanted['organization']}/{wanted['name']}"
        if repo in self.hub.repositories:
            return self.reply(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{repo}"})
        self.hub.repositories[repo] = Repository(private=wanted.get("visibility") == "private")
        return self.reply(200, {"url": f"{self.hub.url}/{repo}"})

    def _model(self, repo, action, body):
        one = self.hub.repositories.get(repo)
        if one is None:
            return self.reply(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        if action == "/preupload/main":
            files = json.loads(body)["files"]
            return self.reply(200, {"files": [self._mode(one, file) for file in files]})
        if action == "/commit/main":
            return self._commit(repo, one, [json.loads(line) for line in body.splitlines()])
        siblings = [{"rfilename": name} for name in sorted(one.files)]
        return self.reply(200, {"id": repo, "sha": one.head, "private": one.private, "siblings": siblings})

    def _mode(self, one, file):
        large = file["path"].endswith(".safetensors") or file["size"] > 1 << 20
        there = one.files.get(file["path"])
        oid = None
        if there is not None:
            blob = b"blob %d\0" % len(there) + there
            oid = hashlib.sha256(there).hexdigest() if large else hashlib.sha1(blob).hexdigest()
        mode = "lfs" if large else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _batch(self, wanted):
        objects = []
        for one in wanted["objects"]:
            answer = dict(one)
            if one["oid"] not in self.hub.objects:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}
            objects.append(answer)
        return self.reply(200, {"transfer": "basic", "objects": objects})

    def _commit(self, repo, one, lines):
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, one.head):
            return self.reply(412, {"error": "A commit has happened since"})
        files = dict(one.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return self.reply(400, {"error": f"{value['path']} was not uploaded"})
                files[value["path"]] = self.hub.objects[value["oid"]]
        oid = hashlib.sha1(repr((one.head, sorted(files.items()))).encode()).hexdigest()
        one.commits.append((oid, files))
        return self.reply(200, {"commitUrl": f"{self.hub.url}/{repo}/commit/{oid}", "commitOid": oid})


@contextmanager
def fake_hub():
    """Serve a fake Hub on a free port of this machine, in threads."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    server.handle_error = lambda *args: None  # a client that is killed is no error of the server
    hub.url = f"http://127.0.0.1:{server.server_port}"
    # Asks often whether to end, so that a test does not wait for it.
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub, home, token=TOKEN):
    """Variables for a process that uploads to it: no login of this machine, no other storage."""
    found = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
    return found if token is None else found | {"HF_TOKEN": token}
