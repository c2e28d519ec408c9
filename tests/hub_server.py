"""A Hub on loopback: serves repositories from memory to the unmodified Hugging Face clients.

    with HubServer({"datasets/user/corpus": {"data/train-0.parquet": b"..."}}) as hub:
        subprocess.run(..., env={**os.environ, **hub.environment(tmp_path)})

Read-only for clients: repository info, file trees, and files with ranges, for datasets and models. The test itself
can push a new commit, and have answers fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

STATUSES = {"401": "Unauthorized", "403": "GatedRepo", "404": "EntryNotFound"}  # with the code the Hub gives
FILES = r"^GET .*/resolve/"
API = r"^(GET|POST) /api/"


class Faults:
    """A seeded plan: of the requests that match `on`, a `share` meet one of `kinds`, in any order they come in.

    `on` is searched for in "METHOD PATH RANGE". A request that meets a fault meets it `repeat` times in a row and is
    served the time after; `repeat=math.inf` is for good. The kinds, as the client sees them:
    "reset": the connection breaks half-way through the body. "truncated": it ends there, before Content-Length.
    "short": half the body, and headers that agree with it. "stall": half the body, and the rest `stall_seconds`
    later. A status ("429" with Retry-After, "500", "503", "404", "403" as for a gated repository): that answer.
    """

    def __init__(self, share: float, kinds: Sequence[str], seed: int = 0, on: str = FILES, repeat: float = 1) -> None:
        self.share, self.kinds, self.seed, self.on, self.repeat = share, kinds, seed, on, repeat
        self._seen: Counter[str] = Counter()

    def __call__(self, method: str, path: str, range_: str) -> str | None:
        request = f"{method} {path} {range_}"
        if not re.search(self.on, request):
            return None
        turn, earlier = divmod(self._seen[request], self.repeat + 1)
        self._seen[request] += 1
        draw = random.Random(f"{self.seed} {request} {turn}")
        return draw.choice(self.kinds) if draw.random() < self.share and earlier < self.repeat else None


class File(NamedTuple):
    content: bytes
    oid: str


class HubServer:
    """`repositories`: files by path, by `datasets/OWNER/NAME` or `models/OWNER/NAME`.

    `token`: if given, requests without it get 401. `faults(method, path, range)` gives the kind of fault that a
    request meets (see `Faults`) or None. `requests` lists (method, path, Range header or "") in the order they came,
    `injected` counts the faults by kind, and `bytes_sent` the bytes of files.
    """

    def __init__(
        self,
        repositories: Mapping[str, Mapping[str, bytes]],
        token: str | None = None,
        faults: Callable[[str, str, str], str | None] | None = None,
        stall_seconds: float = 30,
        retry_after: int = 1,
    ) -> None:
        self.token, self.faults, self.stall_seconds, self.retry_after = token, faults, stall_seconds, retry_after
        self.requests: list[tuple[str, str, str]] = []
        self.injected: Counter[str] = Counter()
        self.bytes_sent = 0
        self.commits: dict[str, dict[str, dict[str, File]]] = {}
        for repository, files in repositories.items():
            self.push(repository, files)
        self.lock, self.closing = threading.Lock(), threading.Event()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a client process, to be set before it imports anything of Hugging Face."""
        token = {"HF_TOKEN": self.token} if self.token else {}
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            **token,
        }

    def push(self, repository: str, files: Mapping[str, bytes | None]) -> str:
        """Make a commit that adds, replaces or (None) removes files, and return it. Older ones stay as they are."""
        commits = self.commits.setdefault(repository, {})
        head = dict(commits[self.commit(repository)]) if commits else {}
        for path, content in files.items():
            head.pop(path, None)
            if content is not None:
                head[path] = File(content, _oid(content))
        listing = [*commits, *sorted((path, file.oid) for path, file in head.items())]
        commit = hashlib.sha1(repr(listing).encode()).hexdigest()
        commits[commit] = head
        return commit

    def commit(self, repository: str) -> str:
        """The newest commit."""
        return list(self.commits[repository])[-1]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # clients open many connections at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that goes away is no news


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keep-alive, so every answer has a Content-Length
    hub: HubServer
    fault: str | None

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path)
        request = (self.command, path, self.headers.get("Range", ""))
        with self.hub.lock:
            self.hub.requests.append(request)
            known = self.hub.token is None or self.headers.get("Authorization") == f"Bearer {self.hub.token}"
            self.fault = self.hub.faults(*request) if self.hub.faults and known else None
            self.hub.injected.update([self.fault] if self.fault else [])
        if not known:
            return self._fail(401, STATUSES["401"])
        if self.fault and self.fault.isdecimal():
            headers = {"Retry-After": str(self.hub.retry_after)} if self.fault == "429" else {}
            return self._fail(int(self.fault), STATUSES.get(self.fault, ""), headers)
        if path == "/api/whoami-v2":
            return self._json({"name": "user", "type": "user", "orgs": [], "auth": {"type": "access_token"}})
        if match := re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(\w+-?\w+)/([^/]+)(?:/(.*))?)?", path):
            kind, name, endpoint, revision, below = match.groups()
            return self._api(f"{kind}/{name}", endpoint or "revision", revision or "main", below or "", body)
        if match := re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind, name, revision, file = match.groups()
            return self._file(f"{kind or 'models'}/{name}", revision, file)
        self._fail(404, "EntryNotFound")

    def _commit(self, repository: str, revision: str) -> str | None:
        """The commit that `revision` stands for, or None after answering that there is none."""
        if repository not in self.hub.commits:
            self._fail(404, "RepoNotFound")
        elif revision == "main":
            return self.hub.commit(repository)
        elif revision in self.hub.commits[repository]:
            return revision
        else:
            self._fail(404, "RevisionNotFound")
        return None

    def _api(self, repository: str, endpoint: str, revision: str, below: str, body: bytes) -> None:
        commit = self._commit(repository, revision)
        if commit is None:
            return
        files = self.hub.commits[repository][commit]
        if endpoint == "revision":
            self._json(
                {
                    "id": repository.split("/", 1)[1],
                    "sha": commit,
                    "siblings": [{"rfilename": path} for path in files],
                    "private": False,
                    "tags": [],
                }
            )
        elif endpoint == "paths-info":
            wanted = _paths(body, self.headers.get("Content-Type", ""))
            self._json([entry for entry in _tree(files, "", recursive=True) if entry["path"] in wanted])
        elif endpoint == "tree":
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
            entries = _tree(files, below, recursive)
            self._json(entries) if entries else self._fail(404, "EntryNotFound")
        else:
            self._fail(404, "EntryNotFound")

    def _file(self, repository: str, revision: str, file: str) -> None:
        commit = self._commit(repository, revision)
        if commit is None:
            return
        if file not in self.hub.commits[repository][commit]:
            return self._fail(404, "EntryNotFound", {"X-Repo-Commit": commit})
        content, oid = self.hub.commits[repository][commit][file]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{oid}"', "Accept-Ranges": "bytes"}
        size, status = len(content), 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(match[1]), min(int(match[2] or size - 1) + 1, size)
            stop = (start + stop + 1) // 2 if self.fault == "short" else stop
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            content, status = content[start:stop], 206
        elif self.fault == "short":
            content = content[: size // 2]
        sent = self._send(status, content, headers)
        with self.hub.lock:
            self.hub.bytes_sent += sent

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code, **(headers or {})})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> int:
        """Answer, with the fault if it is one of the connection; returns the bytes of the body that were sent."""
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return 0
        if self.fault not in ("reset", "truncated", "stall"):
            self.wfile.write(content)
            return len(content)
        half = len(content) // 2
        self.wfile.write(content[:half])
        if self.fault == "stall":
            self.hub.closing.wait(self.hub.stall_seconds)
            self.wfile.write(content[half:])
            return len(content)
        self.close_connection = True
        if self.fault == "reset":  # closing without lingering sends RST; before any orderly shutdown
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
        return half


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _paths(body: bytes, content_type: str) -> set[str]:
    if "json" in content_type:
        return set(json.loads(body)["paths"])
    return set(parse_qs(body.decode())["paths"])


def _tree(files: dict[str, File], below: str, recursive: bool) -> list[dict[str, Any]]:
    """Entries of folder `below`: its files, and folders as directories; all levels if `recursive`."""
    prefix = f"{below.rstrip('/')}/" if below else ""
    entries: dict[str, dict[str, Any]] = {}
    for path, (content, oid) in sorted(files.items()):
        if not path.startswith(prefix):
            continue
        parts = path[len(prefix) :].split("/")
        for depth in range(1, len(parts)):
            folder = prefix + "/".join(parts[:depth])
            if recursive or depth == 1:
                entries[folder] = {"type": "directory", "oid": _oid(folder.encode()), "size": 0, "path": folder}
        if recursive or len(parts) == 1:
            entries[path] = {"type": "file", "oid": oid, "size": len(content), "path": path}
    return list(entries.values())
