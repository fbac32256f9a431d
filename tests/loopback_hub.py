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
        hub, address = self.server.hub, urlsplit(self.path)
        self.path, self.query = unquote(address.path), parse_qs(address.query)
        length = int(self.headers.get("Content-Length") or 0)
        hub.log.append((self.command, self.path))
        for pattern, trouble in hub.troubles.items():
            if re.search(pattern, f"{self.command} {self.path}"):
                return self._suffer(trouble, length)
        body = self.rfile.read(length)
        if len(body) < length:  # the client died
            self.close_connection = True
            return
        for method, pattern, handle in ROUTES:
            found = re.fullmatch(pattern, self.path)
            if method == self.command and found:
                handle(self, body, **found.groupdict())
                return
        self.answer({"error": f"no route {self.path}"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = _serve  # noqa: N815 - as the base class calls them

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
        self.send_response(status)
        for name, value in {"Content-Type": "application/octet-stream" if raw else "application/json"}.items():
            self.send_header(name, value)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def repository(self, kind, repo):
        found = self.server.hub.repositories.get((kind, repo))
        if found is None:
            self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        return found

    def create(self, body):
        asked = json.loads(body)
        kind, name = asked.get("type") or "model", asked["name"]
        key = kind, f"{asked.get('organization') or 'me'}/{name}"
        if key in self.server.hub.repositories:
            return self.answer({"error": "exists", "url": f"{self.server.hub.url}/{key[1]}"}, 409)
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.server.hub.repositories[key] = Repository(private)
        self.answer({"url": f"{self.server.hub.url}/{key[1]}", "name": key[1]})

    def info(self, body, kind, repo, revision="main"):
        found = self.repository(kind.rstrip("s"), repo)
        if found is None:
            return
        files = found.files(revision)
        if files is None:
            return self.answer({"error": "no revision"}, 404, X_Error_Code="RevisionNotFound")
        siblings = [{"rfilename": path} for path in files]
        if "blobs" in self.query:
            entries = [entry(path, raw) for path, raw in files.items()]
            lfs = [{"lfs": {"sha256": each["lfs"]["oid"]} | each["lfs"]} if "lfs" in each else {} for each in entries]
            parts = zip(siblings, entries, lfs, strict=True)
            siblings = [name | {"size": each["size"], "blobId": each["oid"]} | more for name, each, more in parts]
        sha = found.branches.get(revision, revision)
        self.answer({"id": repo, "sha": sha, "private": found.private, "siblings": siblings, "tags": []})

    def tree(self, body, kind, repo, revision, path=""):
        found = self.repository(kind.rstrip("s"), repo)
        if found is None:
            return
        files = found.files(revision)
        if files is None:
            return self.answer({"error": "no revision"}, 404, X_Error_Code="RevisionNotFound")
        inside = {name: raw for name, raw in files.items() if not path or name.startswith(f"{path}/")}
        if path and not inside:
            return self.answer({"error": "no entry"}, 404, X_Error_Code="EntryNotFound")
        entries = [entry(name, raw) for name, raw in inside.items()]
        folders = {"/".join(name.split("/")[: n + 1]) for name in inside for n in range(name.count("/"))}
        recursive = self.query.get("recursive", ["false"])[0].lower() == "true"
        entries += [{"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in sorted(folders)]
        depth = path.count("/") + 1 if path else 0
        self.answer([each for each in entries if recursive or each["path"].count("/") == depth])

    def paths_info(self, body, kind, repo, revision):
        found = self.repository(kind.rstrip("s"), repo)
        if found is None:
            return
        text = body.decode()
        asked = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
        files = found.files(revision) or {}
        entries = [entry(path, files[path]) for path in asked if path in files]
        folders = [path for path in asked if any(name.startswith(f"{path}/") for name in files)]
        self.answer(entries + [{"type": "directory", "path": path, "oid": "0" * 40} for path in folders])

    def branch(self, body, kind, repo, branch):
        found = self.repository(kind.rstrip("s"), repo)
        if found is not None:
            known = branch in found.branches
            found.branches.setdefault(branch, found.branches["main"])
            self.answer({}, 409 if known else 200)

    def preupload(self, body, kind, repo, revision):
        found = self.repository(kind.rstrip("s"), repo)
        if found is None:
            return
        asked = [file["path"] for file in json.loads(body)["files"]]
        modes = {True: "lfs", False: "regular"}
        self.answer(
            {"files": [{"path": p, "uploadMode": modes[p.endswith(LFS)], "shouldIgnore": False} for p in asked]}
        )

    def batch(self, body, **_):
        hub, asked = self.server.hub, json.loads(body)
        objects = []
        for each in asked["objects"]:
            upload = {"upload": {"href": f"{hub.url}/store/{each['oid']}", "header": {}}}
            objects.append(each | {"authenticated": True} | ({} if each["oid"] in hub.stored else {"actions": upload}))
        self.answer({"transfer": "basic", "objects": objects})

    def store(self, body, oid):
        self.server.hub.stored[hashlib.sha256(body).hexdigest()] = body
        self.answer({})

    def commit(self, body, kind, repo, revision):
        found = self.repository(kind.rstrip("s"), repo)
        if found is None:
            return
        entries = [json.loads(line) for line in body.splitlines()]
        parent = entries[0]["value"].get("parentCommit")
        if parent is not None and parent != found.branches[revision]:
            return self.answer({"error": "The expected parent commit is another"}, 412)
        files = dict(found.files(revision))
        for each in entries[1:]:
            value = each["value"]
            if each["key"] == "deletedFile":
                del files[value["path"]]
            elif each["key"] == "lfsFile":
                files[value["path"]] = self.server.hub.stored[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        sha = found.commit(revision, files)
        url = f"{self.server.hub.url}/{repo}/commit/{sha}"
        self.answer({"commitUrl": url, "commitOid": sha, "success": True})

    def resolve(self, body, repo, revision, path, kind="models/"):
        found = self.repository({"": "model", None: "model"}.get(kind, (kind or "").rstrip("s/")) or "model", repo)
        if found is None:
            return
        files = found.files(revision)
        if files is None:
            return self.answer({"error": "no revision"}, 404, X_Error_Code="RevisionNotFound")
        if path not in files:
            return self.answer({"error": "no entry"}, 404, X_Error_Code="EntryNotFound")
        sha = found.branches.get(revision, revision)
        raw, status = files[path], 200
        etag = hashlib.sha256(raw).hexdigest()
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        headers = {}
        if span:
            last = int(span[2]) if span[2] else len(raw) - 1
            headers["Content_Range"] = f"bytes {span[1]}-{min(last, len(raw) - 1)}/{len(raw)}"
            raw, status = raw[int(span[1]) : last + 1], 206
        self.answer(raw, status, ETag=f'"{etag}"', X_Repo_Commit=sha, Accept_Ranges="bytes", **headers)

    def yaml(self, body):
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
    ("PUT", "/store/(?P<oid>.+)", Handler.store),
    *(
        (method, r"/(?P<kind>datasets/|spaces/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", r)
        for method in ("GET", "HEAD")
        for r in (Handler.resolve,)
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
        self.url, self.repositories, self.stored, self.log, self.troubles = url, {}, {}, [], {}

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
