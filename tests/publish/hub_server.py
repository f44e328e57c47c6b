"""A server on this machine that speaks the calls of the Hugging Face Hub that an upload of a data set needs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_theTokenOfThisTest"
ROUTES = {
    "POST /api/repos/create": "create",
    "POST /api/validate-yaml": "validate",
    "GET /api/datasets/[^/]+/[^/]+(/revision/main)?": "info",
    "POST /api/datasets/[^/]+/[^/]+/preupload/main": "preupload",
    "POST /datasets/[^/]+/[^/]+[.]git/info/lfs/objects/batch": "batch",
    "PUT /lfs/[0-9a-f]{64}": "put",
    "POST /api/datasets/[^/]+/[^/]+/commit/main": "commit",
}


class Hub:
    """What the server has and was asked.

    Attributes:
        address: where it listens.
        files: the files of each data set, by its name.
        calls: names of the calls that it has answered or broken.
        commits: the paths that each commit has changed.
        breaks: calls at which it closes the connection without an answer.
    """

    def __init__(self) -> None:
        self.address = ""
        self.files: dict[str, dict[str, bytes]] = {}
        self.calls: list[str] = []
        self.commits: list[list[str]] = []
        self.breaks: set[str] = set()
        self.large: dict[str, bytes] = {}

    def head(self, name: str) -> str:
        """Return the commit of a data set: it follows from the files."""
        files = {path: hashlib.sha256(content).hexdigest() for path, content in self.files[name].items()}
        return hashlib.sha1(json.dumps(files, sort_keys=True).encode()).hexdigest()

    def create(self, name: str, body: bytes) -> tuple[int, Any]:
        asked = json.loads(body)
        whole = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if not whole.startswith("me/"):
            return 403, {"error": "no rights in this namespace"}
        is_new = whole not in self.files
        self.files.setdefault(whole, {".gitattributes": b"*.parquet filter=lfs\n"})
        return (200 if is_new else 409), {"url": f"{self.address}/datasets/{whole}", "error": "it exists"}

    def validate(self, name: str, body: bytes) -> tuple[int, Any]:
        content = json.loads(body)["content"]
        _, head, _ = re.split("^---$", content, maxsplit=2, flags=re.MULTILINE)
        try:
            yaml.safe_load(head)
        except yaml.YAMLError as error:
            return 400, {"errors": [{"message": str(error)}]}
        return 200, {"errors": [], "warnings": []}

    def info(self, name: str, body: bytes) -> tuple[int, Any]:
        siblings = [{"rfilename": path} for path in self.files[name]]
        return 200, {"id": name, "sha": self.head(name), "private": False, "tags": [], "siblings": siblings}

    def preupload(self, name: str, body: bytes) -> tuple[int, Any]:
        files = []
        for file in json.loads(body)["files"]:
            is_large = file["path"].endswith(".parquet")
            entry = {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
            content = self.files[name].get(file["path"])
            if content is not None:
                blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                entry["oid"] = hashlib.sha256(content).hexdigest() if is_large else blob
            files.append(entry)
        return 200, {"files": files}

    def batch(self, name: str, body: bytes) -> tuple[int, Any]:
        objects = []
        for one in json.loads(body)["objects"]:
            entry = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.large:
                entry["actions"] = {"upload": {"href": f"{self.address}/lfs/{one['oid']}"}}
            objects.append(entry)
        return 200, {"transfer": "basic", "objects": objects}

    def put(self, name: str, body: bytes) -> tuple[int, Any]:
        self.large[hashlib.sha256(body).hexdigest()] = body
        return 200, {}

    def commit(self, name: str, body: bytes) -> tuple[int, Any]:
        files, changed = dict(self.files[name]), []
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                if value.get("parentCommit") not in (None, self.head(name)):
                    return 412, {"error": "the branch has moved"}
                continue
            changed.append(value["path"])
            if entry["key"] == "deletedFile":
                del files[value["path"]]
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        self.files[name] = files
        self.commits.append(sorted(changed))
        oid = self.head(name)
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{self.address}/datasets/{name}/commit/{oid}"}


def answering(hub: Hub) -> type[BaseHTTPRequestHandler]:
    """Return a handler of requests that asks a hub."""

    def answer(self: BaseHTTPRequestHandler) -> None:
        path = self.path.partition("?")[0]
        call = next((name for route, name in ROUTES.items() if re.fullmatch(route, f"{self.command} {path}")), "")
        hub.calls.append(call or f"{self.command} {path}")
        size = int(self.headers.get("Content-Length") or 0)
        if call in hub.breaks:
            self.rfile.read(size // 2)  # in the middle of what is sent
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        status, content = answer_of(hub, call, path, self.headers.get("Authorization"), self.rfile.read(size))
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    methods = dict.fromkeys(("do_GET", "do_POST", "do_PUT"), answer)
    return type("Handler", (BaseHTTPRequestHandler,), {**methods, "log_message": lambda *words: None})


def answer_of(hub: Hub, call: str, path: str, authorization: str | None, body: bytes) -> tuple[int, Any]:
    """Return status and content of the answer to a call."""
    owner, name = [*re.sub("^/(api/)?datasets/", "", path).split("/"), ""][:2]
    name = f"{owner}/{name.removesuffix('.git')}"
    if call != "put" and authorization != f"Bearer {TOKEN}":
        return 401, {"error": f"invalid token {authorization}"}
    if call in ("create", "validate", "put") or (call and name in hub.files):
        answer: tuple[int, Any] = getattr(hub, call)(name, body)
        return answer
    return 404, {"error": "not here"}


@contextmanager
def running() -> Iterator[Hub]:
    """Start a hub, and stop it at the end."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), answering(hub))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()
