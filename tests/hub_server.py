"""A Hub on loopback: serves repositories from memory to the unmodified Hugging Face clients.

    with HubServer({"datasets/user/corpus": {"data/train-0.parquet": b"..."}}) as hub:
        subprocess.run(..., env={**os.environ, **hub.environment(tmp_path)})

Read-only: repository info, file trees, and files with ranges, for datasets and models.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class HubServer:
    """`repositories`: files by path, by `datasets/OWNER/NAME` or `models/OWNER/NAME`.

    `requests` lists (method, path, Range header or "") in the order they came. `token`: if given, requests
    without it get 401.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]], token: str | None = None) -> None:
        self.repositories, self.token = repositories, token
        self.requests: list[tuple[str, str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a client process, to be set before it imports anything of Hugging Face."""
        token = {"HF_TOKEN": self.token} if self.token else {}
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            **token,
        }

    def commit(self, repository: str) -> str:
        digest = hashlib.sha1()
        for path, content in sorted(self.repositories[repository].items()):
            digest.update(path.encode() + b"\0" + content)
        return digest.hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keep-alive, so every answer has a Content-Length
    hub: HubServer

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
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._fail(401, "Unauthorized")
        if path == "/api/whoami-v2":
            return self._json({"name": "user", "type": "user", "orgs": [], "auth": {"type": "access_token"}})
        if match := re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(\w+-?\w+)/([^/]+)(?:/(.*))?)?", path):
            kind, name, endpoint, revision, below = match.groups()
            return self._api(f"{kind}/{name}", endpoint or "revision", revision or "main", below or "", body)
        if match := re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind, name, revision, file = match.groups()
            return self._file(f"{kind or 'models'}/{name}", revision, file)
        self._fail(404, "EntryNotFound")

    def _files(self, repository: str, revision: str) -> dict[str, bytes] | None:
        """The repository's files, or None after answering that it or the revision does not exist."""
        files = self.hub.repositories.get(repository)
        if files is None:
            self._fail(404, "RepoNotFound")
        elif revision not in ("main", self.hub.commit(repository)):
            self._fail(404, "RevisionNotFound")
        else:
            return files
        return None

    def _api(self, repository: str, endpoint: str, revision: str, below: str, body: bytes) -> None:
        files = self._files(repository, revision)
        if files is None:
            return
        if endpoint == "revision":
            self._json(
                {
                    "id": repository.split("/", 1)[1],
                    "sha": self.hub.commit(repository),
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
        files = self._files(repository, revision)
        if files is None:
            return
        if file not in files:
            return self._fail(404, "EntryNotFound", {"X-Repo-Commit": self.hub.commit(repository)})
        content, status = files[file], 200
        headers = {"X-Repo-Commit": self.hub.commit(repository), "ETag": f'"{_oid(content)}"', "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(match[1]), min(int(match[2] or len(content) - 1) + 1, len(content))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            content, status = content[start:stop], 206
        self._send(status, content, headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code, **(headers or {})})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _paths(body: bytes, content_type: str) -> set[str]:
    if "json" in content_type:
        return set(json.loads(body)["paths"])
    return set(parse_qs(body.decode())["paths"])


def _tree(files: dict[str, bytes], below: str, recursive: bool) -> list[dict[str, Any]]:
    """Entries of folder `below`: its files, and folders as directories; all levels if `recursive`."""
    prefix = f"{below.rstrip('/')}/" if below else ""
    entries: dict[str, dict[str, Any]] = {}
    for path, content in sorted(files.items()):
        if not path.startswith(prefix):
            continue
        parts = path[len(prefix) :].split("/")
        for depth in range(1, len(parts)):
            folder = prefix + "/".join(parts[:depth])
            if recursive or depth == 1:
                entries[folder] = {"type": "directory", "oid": _oid(folder.encode()), "size": 0, "path": folder}
        if recursive or len(parts) == 1:
            entries[path] = {"type": "file", "oid": _oid(content), "size": len(content), "path": path}
    return list(entries.values())
