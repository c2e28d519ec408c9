"""A Hub on loopback: serves repositories from memory to the unmodified Hugging Face clients.

    with HubServer({"datasets/user/corpus": {"data/train-0.parquet": b"..."}}) as hub:
        subprocess.run(..., env={**os.environ, **hub.environment(tmp_path)})

Clients read repository info, file trees, and files with ranges, of datasets and models; with a token they make model
repositories, branches and tags, and commit to them, large files by the LFS protocol. The test itself can push a new
commit, and have answers fail.
"""

from __future__ import annotations

import base64
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
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

STATUSES = {"401": "Unauthorized", "403": "GatedRepo", "404": "EntryNotFound"}  # with the code the Hub gives
FILES = r"^GET .*/resolve/"
API = r"^(GET|POST) /api/"
LICENSES = ("apache-2.0", "mit", "cc-by-4.0")


class Faults:
    """A seeded plan: of the requests that match `on`, a `share` meet one of `kinds`, in any order they come in.

    `on` is searched for in "METHOD PATH RANGE". A request that meets a fault meets it `repeat` times in a row and is
    served the time after; `repeat=math.inf` is for good. The kinds, as the client sees them:
    "reset": the connection breaks half-way through the body. "truncated": it ends there, before Content-Length.
    "short": half the body, and headers that agree with it. "stall": half the body, and the rest `stall_seconds`
    later. "cut": the connection breaks half-way through the body that the client sends. A status ("429" with
    Retry-After, "500", "503", "404", "403" as for a gated repository): that answer.
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

    `token`: if given, requests without it get 401; it is that of `user`, and may `role`. `faults(method, path, range)`
    gives the kind of fault that a request meets (see `Faults`) or None. `requests` lists (method, path, Range header or
    "") in the order they came, `injected` counts the faults by kind, and `bytes_sent` the bytes of files. `bodies` is
    all that was sent here. Repositories in `private` are; `uploaded` holds large files by their hash, `refs` the commit
    of each branch and tag. `before_answer(method, path, range)` is called for each request, and may wait.
    """

    user, role = "me", "write"

    def __init__(
        self,
        repositories: Mapping[str, Mapping[str, bytes]],
        token: str | None = None,
        faults: Callable[[str, str, str], str | None] | None = None,
        stall_seconds: float = 30,
        retry_after: int = 1,
        before_answer: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self.token, self.faults, self.stall_seconds, self.retry_after = token, faults, stall_seconds, retry_after
        self.before_answer = before_answer
        self.requests: list[tuple[str, str, str]] = []
        self.injected: Counter[str] = Counter()
        self.bytes_sent = 0
        self.bodies: list[bytes] = []
        self.private: set[str] = set()
        self.uploaded: dict[str, bytes] = {}
        self.refs: dict[str, dict[str, dict[str, str]]] = {}
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

    def push(self, repository: str, files: Mapping[str, bytes | None], branch: str = "main") -> str:
        """Make a commit that adds, replaces or (None) removes files, and return it. Older ones stay as they are."""
        commits = self.commits.setdefault(repository, {})
        heads = self.refs.setdefault(repository, {"branches": {}, "tags": {}})["branches"]
        head = dict(commits[heads[branch]]) if branch in heads else {}  # a new branch begins empty
        for path, content in files.items():
            head.pop(path, None)
            if content is not None:
                head[path] = File(content, _oid(content))
        listing = [*commits, *sorted((path, file.oid) for path, file in head.items())]
        commit = hashlib.sha1(repr(listing).encode()).hexdigest()
        commits[commit] = head
        heads[branch] = commit
        return commit

    def commit(self, repository: str, branch: str = "main") -> str:
        """The newest commit of a branch."""
        return self.refs[repository]["branches"][branch]

    def files(self, repository: str, branch: str = "main") -> dict[str, bytes]:
        """What is in a repository."""
        return {path: file.content for path, file in self.commits[repository][self.commit(repository, branch)].items()}

    def count(self, request: str) -> int:
        """How many requests match, in "METHOD PATH"."""
        return sum(bool(re.search(request, f"{method} {path}")) for method, path, _ in self.requests)


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

    do_POST = do_PUT = do_GET

    def _body(self) -> bytes:
        """What the client sends; with a fault "cut", half of it, and the connection is gone."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            size = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(size // 2 if self.fault == "cut" else size)
            if self.fault == "cut":
                self._break()
            return body
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        request = (self.command, path, self.headers.get("Range", ""))
        with self.hub.lock:
            self.hub.requests.append(request)
            known = self.hub.token is None or self.headers.get("Authorization") == f"Bearer {self.hub.token}"
            # Addresses of the storage are signed, and anybody may have a card checked.
            known = known or path.startswith(("/storage/", "/api/validate-yaml"))
            self.fault = self.hub.faults(*request) if self.hub.faults and known else None
            self.hub.injected.update([self.fault] if self.fault else [])
        if self.hub.before_answer:
            self.hub.before_answer(*request)
        body = self._body()
        self.hub.bodies.append(body)
        if self.fault == "cut":
            return
        if not known:
            return self._fail(401, STATUSES["401"])
        if self.fault and self.fault.isdecimal():
            headers = {"Retry-After": str(self.hub.retry_after)} if self.fault == "429" else {}
            is_read = self.command in ("GET", "HEAD")
            return self._fail(int(self.fault), STATUSES.get(self.fault, "") if is_read else "", headers)
        if path == "/api/whoami-v2":
            auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": self.hub.role}}
            return self._json({"name": self.hub.user, "type": "user", "orgs": [], "auth": auth})
        if self.command in ("POST", "PUT") and (change := self._change(path)):
            return change(body)
        if match := re.fullmatch(r"/api/(models)/([^/]+/[^/]+)/refs", path):
            refs = self.hub.refs["/".join(match.groups())]
            kinds = {"branches": "heads", "tags": "tags"}
            return self._json(
                {
                    kind: [{"name": n, "ref": f"refs/{ref}/{n}", "targetCommit": c} for n, c in refs[kind].items()]
                    for kind, ref in kinds.items()
                }
                | {"converts": []}
            )
        if match := re.fullmatch(
            r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(\w+-?\w+)/(refs/\w+/\w+|[^/]+)(?:/(.*))?)?", path
        ):
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
        elif commit := next((refs[revision] for refs in self.hub.refs[repository].values() if revision in refs), None):
            return commit
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
                    "private": repository in self.hub.private,
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

    def _change(self, path: str) -> Callable[[bytes], None] | None:
        """What a request to change something does, if it is one."""
        name = r"([^/]+/[^/]+)"
        for pattern, change in (
            (r"/api/repos/create", self._create),
            (r"/api/validate-yaml", self._validate),
            (rf"/api/models/{name}/preupload/([^/]+)", self._preupload),
            (rf"/api/models/{name}/commit/([^/]+)", self._make_commit),
            (rf"/api/models/{name}/(branch|tag)/([^/]+)", self._make_ref),
            (rf"/{name}\.git/info/lfs/objects/(batch|verify)", self._lfs),
            (r"/storage/(\w+)", self._store),
        ):
            if match := re.fullmatch(pattern, path):
                return partial(change, *match.groups())
        return None

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        owner = asked.get("organization") or self.hub.user
        if owner != self.hub.user:
            return self._fail(403, "Forbidden")
        repository, answer = f"models/{owner}/{asked['name']}", {"url": f"{self.hub.url}/{owner}/{asked['name']}"}
        if repository in self.hub.commits:
            return self._json(answer, 409)
        if asked.get("private") or asked.get("visibility") == "private":
            self.hub.private.add(repository)
        self.hub.push(repository, {".gitattributes": b"*.safetensors filter=lfs\n"})
        self._json(answer)

    def _validate(self, body: bytes) -> None:
        """Refuses what the Hub does: unknown licenses and languages, results that lack a required part."""
        errors = []
        try:
            _, head, _ = json.loads(body)["content"].split("---\n", 2)
            card = yaml.safe_load(head)
        except (ValueError, yaml.YAMLError):
            return self._json({"errors": [{"message": "no metadata"}], "warnings": []}, 400)
        if card.get("license", LICENSES[0]) not in LICENSES:
            errors.append({"message": '"license" must be one of ' + ", ".join(LICENSES)})
        languages = [card["language"]] if isinstance(card.get("language"), str) else card.get("language", [])
        if not all(re.fullmatch("[a-z]{2,3}", name) for name in languages):
            errors.append({"message": '"language" must only contain ISO 639-1, 639-2 or 639-3 codes'})
        for index in card.get("model-index", []):
            for result in index["results"]:
                parts = [result["task"].get("type"), result["dataset"].get("type"), result["dataset"].get("name")]
                parts += [value for metric in result["metrics"] for value in (metric.get("type"), metric.get("value"))]
                if not index.get("name") or None in parts:
                    errors.append({"message": '"model-index" lacks a required part'})
        self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _preupload(self, name: str, revision: str, body: bytes) -> None:
        if (commit := self._commit(f"models/{name}", revision)) is None:
            return
        there, answer = self.hub.commits[f"models/{name}"][commit], []
        for path in [file["path"] for file in json.loads(body)["files"]]:
            mode, oid = "lfs" if path.endswith((".safetensors", ".png")) else "regular", None
            if path in there:
                content = there[path].content
                oid = hashlib.sha256(content).hexdigest() if mode == "lfs" else there[path].oid
            answer.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": answer})

    def _lfs(self, name: str, step: str, body: bytes) -> None:
        asked = json.loads(body)
        if step == "verify":
            is_there = len(self.hub.uploaded.get(asked["oid"], b"")) == asked["size"]
            return self._json({}) if is_there else self._fail(404, "EntryNotFound")
        objects = []
        for part in asked["objects"]:
            upload = {"href": f"{self.hub.url}/storage/{part['oid']}?X-Amz-Signature=signed", "header": {}}
            verify = {"href": f"{self.hub.url}/{name}.git/info/lfs/objects/verify", "header": {}}
            actions = {} if part["oid"] in self.hub.uploaded else {"actions": {"upload": upload, "verify": verify}}
            objects.append({**part, "authenticated": True, **actions})
        self._json({"transfer": "basic", "objects": objects})

    def _store(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._fail(400, "BadDigest")
        self.hub.uploaded[oid] = body
        self._json({})

    def _make_commit(self, name: str, branch: str, body: bytes) -> None:
        files: dict[str, bytes | None] = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploaded[value["oid"]]
            elif line["key"] == "deletedFile":
                files[value["path"]] = None
        with self.hub.lock:
            commit = self.hub.push(f"models/{name}", files, branch)
        self._json({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{name}/commit/{commit}"})

    def _make_ref(self, name: str, kind: str, at: str, body: bytes) -> None:
        """A branch named `at`, from main; or a tag for the commit `at`."""
        refs = self.hub.refs[f"models/{name}"]["branches" if kind == "branch" else "tags"]
        ref = at if kind == "branch" else json.loads(body)["tag"]
        if ref in refs:
            return self._fail(409, "Conflict")
        commit = self._commit(f"models/{name}", "main" if kind == "branch" else at)
        if commit is not None:
            refs[ref] = commit
            self._json({})

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

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
        if self.fault == "reset":
            self._break()
        return half

    def _break(self) -> None:
        """Closing without lingering sends RST; before any orderly shutdown."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())


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
