"""A hub on this machine: the endpoints that huggingface_hub, transformers and datasets use, with real commits."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

ENVIRONMENT = {"HF_TOKEN": "hf_fake", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
LFS = (".safetensors", ".parquet", ".png")


class Repository:
    """Branches of snapshots: `{commit: {path: bytes}}`."""

    def __init__(self, private):
        self.private, self.count = private, 0
        self.commits, self.branches = {}, {}
        self.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})

    def commit(self, branch, files):
        self.count += 1
        sha = f"{self.count:040x}"
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def files(self, revision="main"):
        return self.commits.get(self.branches.get(revision, revision))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _serve(self):
        """Answer by the first route that fits; one of a repository needs it, and its revision if the path has one."""
        hub, address = self.server.hub, urlsplit(self.path)
        path, self.query = unquote(address.path), parse_qs(address.query)
        length = int(self.headers.get("Content-Length") or 0)
        for pattern, trouble in hub.troubles.items():
            if re.search(pattern, f"{self.command} {path}"):
                return self._suffer(trouble, length)
        self.body = self.rfile.read(length)
        if len(self.body) < length:  # the client died
            self.close_connection = True
            return
        for methods, pattern, handle in ROUTES:
            found = re.fullmatch(pattern, path)
            if self.command in methods and found:
                return self._handle(handle, found.groupdict())
        self.answer({"error": f"no route {path}"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = _serve  # noqa: N815 - as the base class calls them

    def _handle(self, handle, parts):
        if "repo" in parts:
            kind = (parts.pop("kind") or "models").rstrip("s/")
            self.repo = parts.pop("repo")
            self.repository = self.server.hub.repositories.get((kind, self.repo))
            if self.repository is None:
                return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            self.revision = parts.pop("revision", "main")
            self.files = self.repository.files(self.revision)
            if self.files is None:
                return self.answer({"error": "no revision"}, 404, X_Error_Code="RevisionNotFound")
        handle(self, **parts)

    def _suffer(self, trouble, length):
        """Answer a status, or break off."""
        if trouble == "break":
            self.rfile.read(length // 2)
            self.connection.close()
            self.close_connection = True
        else:
            self.rfile.read(length)
            self.answer({"error": "no"}, trouble)

    def answer(self, content, status=200, **headers):
        raw = isinstance(content, bytes)
        body = content if raw else json.dumps(content).encode()
        headers |= {"Content-Type": "application/octet-stream" if raw else "application/json"}
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def create(self):
        asked, hub = json.loads(self.body), self.server.hub
        key = asked.get("type") or "model", f"{asked.get('organization') or 'me'}/{asked['name']}"
        known = key in hub.repositories
        private = asked.get("private") is True or asked.get("visibility") == "private"
        hub.repositories.setdefault(key, Repository(private))
        self.answer({"url": f"{hub.url}/{key[1]}", "name": key[1]}, 409 if known else 200)

    def info(self):
        siblings = [{"rfilename": path} for path in self.files]
        if "blobs" in self.query:
            for sibling, (path, raw) in zip(siblings, self.files.items(), strict=True):
                listed = entry(path, raw)
                sibling |= {"size": listed["size"], "blobId": listed["oid"]}
                if "lfs" in listed:
                    sibling["lfs"] = listed["lfs"] | {"sha256": listed["lfs"]["oid"]}
        sha = self.repository.branches.get(self.revision, self.revision)
        private = self.repository.private
        self.answer({"id": self.repo, "sha": sha, "private": private, "siblings": siblings, "tags": []})

    def tree(self, path=""):
        inside = {name: raw for name, raw in self.files.items() if not path or name.startswith(f"{path}/")}
        if path and not inside:
            return self.answer({"error": "no entry"}, 404, X_Error_Code="EntryNotFound")
        folders = {"/".join(name.split("/")[: n + 1]) for name in inside for n in range(name.count("/"))}
        entries = [entry(name, raw) for name, raw in inside.items()]
        entries += [{"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in sorted(folders)]
        recursive = self.query.get("recursive", ["false"])[0].lower() == "true"
        depth = path.count("/") + 1 if path else 0
        self.answer([each for each in entries if recursive or each["path"].count("/") == depth])

    def paths_info(self):
        text = self.body.decode()
        asked = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
        entries = [entry(path, self.files[path]) for path in asked if path in self.files]
        folders = [path for path in asked if any(name.startswith(f"{path}/") for name in self.files)]
        self.answer(entries + [{"type": "directory", "path": path, "oid": "0" * 40} for path in folders])

    def branch(self, branch):
        branches = self.repository.branches
        known = branch in branches
        branches.setdefault(branch, branches["main"])
        self.answer({}, 409 if known else 200)

    def preupload(self):
        modes = {True: "lfs", False: "regular"}
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        files = [{"path": path, "uploadMode": modes[path.endswith(LFS)], "shouldIgnore": False} for path in paths]
        self.answer({"files": files})

    def batch(self):
        hub, objects = self.server.hub, json.loads(self.body)["objects"]
        for each in objects:
            each["authenticated"] = True
            if each["oid"] not in hub.stored:
                each["actions"] = {"upload": {"href": f"{hub.url}/store/{each['oid']}", "header": {}}}
        self.answer({"transfer": "basic", "objects": objects})

    def store(self):
        self.server.hub.stored[hashlib.sha256(self.body).hexdigest()] = self.body
        self.answer({})

    def commit(self):
        entries = [json.loads(line) for line in self.body.splitlines()]
        parent = entries[0]["value"].get("parentCommit")
        if parent not in (None, self.repository.branches[self.revision]):
            return self.answer({"error": "The expected parent commit is another"}, 412)
        files = dict(self.files)
        for each in entries[1:]:
            value = each["value"]
            if each["key"] == "deletedFile":
                del files[value["path"]]
            elif each["key"] == "lfsFile":
                files[value["path"]] = self.server.hub.stored[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        sha = self.repository.commit(self.revision, files)
        url = f"{self.server.hub.url}/{self.repo}/commit/{sha}"
        self.answer({"commitUrl": url, "commitOid": sha, "success": True})

    def resolve(self, path):
        if path not in self.files:
            return self.answer({"error": "no entry"}, 404, X_Error_Code="EntryNotFound")
        raw, status = self.files[path], 200
        sha = self.repository.branches.get(self.revision, self.revision)
        headers = {"ETag": f'"{hashlib.sha256(raw).hexdigest()}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if span:
            last = min(int(span[2] or len(raw)), len(raw) - 1)
            headers["Content-Range"] = f"bytes {span[1]}-{last}/{len(raw)}"
            raw, status = raw[int(span[1]) : last + 1], 206
        self.answer(raw, status, **headers)

    def yaml(self):
        self.answer({"warnings": [], "errors": []})

    def log_message(self, *_):
        pass


KIND = r"/api/(?P<kind>models|datasets|spaces)/(?P<repo>[^/]+/[^/]+)"
ROUTES = (
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.yaml),
    ("GET", KIND, Handler.info),
    ("GET", KIND + "/revision/(?P<revision>.+)", Handler.info),
    ("GET", KIND + "/tree/(?P<revision>[^/]+)/?(?P<path>.*)", Handler.tree),
    ("POST", KIND + "/paths-info/(?P<revision>.+)", Handler.paths_info),
    ("POST", KIND + "/branch/(?P<branch>.+)", Handler.branch),
    ("POST", KIND + "/preupload/(?P<revision>.+)", Handler.preupload),
    ("POST", KIND + "/commit/(?P<revision>.+)", Handler.commit),
    ("POST", r"/.+\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/store/.+", Handler.store),
    (
        ("GET", "HEAD"),
        r"/(?P<kind>datasets/|spaces/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
        Handler.resolve,
    ),
)


def entry(path, raw):
    """A file as the tree lists it."""
    blob = hashlib.sha1(f"blob {len(raw)}\0".encode() + raw).hexdigest()
    found = {"type": "file", "path": path, "size": len(raw), "oid": blob}
    if path.endswith(LFS):
        found["lfs"] = {"oid": hashlib.sha256(raw).hexdigest(), "size": len(raw), "pointerSize": 130}
    return found


class Hub:
    """The server's state; `troubles` maps patterns of `METHOD path` to a status or `break`."""

    def __init__(self, url):
        self.url, self.repositories, self.stored, self.troubles = url, {}, {}, {}

    def files(self, repo="me/model", kind="model", revision="main"):
        return self.repositories[kind, repo].files(revision)


@contextmanager
def serve():
    """Yield a running hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
