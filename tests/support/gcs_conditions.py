"""What fake-gcs-server leaves out of Google's service and safepoint relies on, as a proxy in front of it.

- It ignores `ifGenerationMatch` on media uploads and on deletion: checked here, one change of the bucket at a time.
- It lists any bucket as empty: one that is missing is answered with 404 here.
- It lists all objects on one page, and its page tokens are names as they stand: here a page has at most 1,000 objects,
  and a token may stand in a URL, as in the real one.
"""

from __future__ import annotations

import base64
import json
import threading
from urllib.parse import quote, urlencode, urlsplit

from typing_extensions import override

from support.http_proxy import Exchange, HttpProxy, Reply

__all__ = ["GcsConditions"]

_MAX_PAGE = 1000


class GcsConditions(HttpProxy):
    """In front of one fake-gcs-server, which nobody else may use."""

    def __init__(self, server: str) -> None:
        self._changing = threading.Lock()
        self._buckets: set[str] = set()
        self.page = _MAX_PAGE
        super().__init__(server)

    @override
    def answer(self, exchange: Exchange) -> Reply | None:
        if exchange.method in ("POST", "DELETE"):
            _ = exchange.body  # not under the lock: the client may stall
            with self._changing:
                return self._change(exchange)
        bucket, is_object = _bucket_of(exchange.path)
        if bucket and not is_object and exchange.path.endswith("/o"):
            return self._list(exchange, bucket)
        return exchange.forward()

    def _change(self, exchange: Exchange) -> Reply:
        wanted = exchange.query.get("ifGenerationMatch")
        if wanted is not None:
            bucket, _ = _bucket_of(exchange.path)
            missing = self._refusal(exchange, bucket)
            if missing is not None:
                return missing
            name = exchange.query.get("name") or exchange.path.partition("/o/")[2]
            found = exchange.forward(method="GET", target=f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}")
            generation = json.loads(found.body)["generation"] if found.status == 200 else "0"
            if generation != wanted and (exchange.method == "POST" or generation != "0"):
                return Reply(status=412)
        return exchange.forward()

    def _list(self, exchange: Exchange, bucket: str) -> Reply:
        missing = self._refusal(exchange, bucket)
        if missing is not None:
            return missing
        query = {"maxResults": str(self.page), **exchange.query}
        if "pageToken" in query:
            query["pageToken"] = base64.urlsafe_b64decode(query["pageToken"]).decode()
        reply = exchange.forward(method="GET", target=f"{urlsplit(exchange.target).path}?{urlencode(query)}")
        content = json.loads(reply.body)
        if "nextPageToken" in content:
            content["nextPageToken"] = base64.urlsafe_b64encode(content["nextPageToken"].encode()).decode()
        return Reply(status=reply.status, headers=reply.headers, body=json.dumps(content).encode())

    def _refusal(self, exchange: Exchange, bucket: str) -> Reply | None:
        if bucket in self._buckets:
            return None
        found = exchange.forward(method="GET", target=f"/storage/v1/b/{bucket}")
        if found.status == 200:
            self._buckets.add(bucket)
        return None if found.status == 200 else found


def _bucket_of(path: str) -> tuple[str, bool]:
    """Return the bucket that a path of the JSON API is about, and whether it is about one object of it."""
    _, _, rest = path.partition("/storage/v1/b/")
    bucket, _, below = rest.partition("/")
    return bucket, below.startswith("o/")
