"""An S3 server through the client of s3fs: ranges on condition that the ETag stays, uploads in parts checked by their ETags."""

from __future__ import annotations

import hashlib
import math
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dayzero.core.units import MIB
from dayzero.model.remote.outcomes import ObjectState, Outcome, Passing, after_s, check_range, fill, kind_of, told
from dayzero.model.remote.protocols import Asynchronous, md5_of

# S3 allows 10,000 parts of at least 5 MiB; a part is what is sent again when a connection drops.
PART_BYTES, MAX_PARTS, PART_THREADS = 16 * MIB, 9000, 4
PART_ATTEMPTS, PART_PAUSE_S = 5, 0.2


class S3Access(Asynchronous):
    """An S3 server; endpoint and credentials come from where its own client looks for them."""

    def __init__(self, address: str, timeout_s: float, connections: int) -> None:
        import s3fs

        # One request each here, so no tries of the client's own; checksums only where the protocol demands them, as other
        # servers than Amazon's do not all know the newer ones (parts are checked against their ETag instead).
        settings = {"retries": {"total_max_attempts": 1, "mode": "standard"}, "connect_timeout": timeout_s,
                    "read_timeout": timeout_s, "max_pool_connections": 2 * connections + PART_THREADS,
                    "request_checksum_calculation": "when_required",
                    "response_checksum_validation": "when_required"}  # fmt: skip
        self.system = s3fs.S3FileSystem(config_kwargs=settings, skip_instance_cache=True, use_listings_cache=False)
        self.system.retries = 1
        self.bucket, prefix, _ = self.system.split_path(address)
        self.prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        if not self.bucket:
            raise ValueError("no bucket in the address")

    def look(self, name: str) -> ObjectState | None:
        with told(missing=False):
            return self._run(self._look, name)
        return None

    def read(self, name: str, start: int, target: memoryview, state: ObjectState) -> None:
        with told() as outcome:
            self._run(self._read, name, start, target, state, outcome)

    def entries(self) -> dict[str, int | None] | None:
        with told(missing=False):
            return self._run(self._list, "/")
        return {}

    def everything(self) -> dict[str, int]:
        with told(missing=False):
            return self._run(self._list, "")
        return {}

    def put(self, name: str, path: Path) -> tuple[ObjectState, bool]:
        size = path.stat().st_size
        part = max(PART_BYTES, math.ceil(size / MAX_PARTS / MIB) * MIB)
        with told():
            if size <= part:
                digest = md5_of(path, 0, size).hex()
                answer = self._ask("put_object", Key=self.prefix + name, Body=path.read_bytes())
                return self._stored(size, answer["ETag"], digest)
            return self._put_parts(name, path, size, part)

    def _put_parts(self, name: str, path: Path, size: int, part: int) -> tuple[ObjectState, bool]:
        key = self.prefix + name
        upload = self._ask("create_multipart_upload", Key=key)["UploadId"]

        def send(number: int) -> tuple[str, bytes]:
            with path.open("rb", buffering=0) as file:
                file.seek(number * part)
                body = file.read(part)
            for attempt in range(1, PART_ATTEMPTS + 1):  # one part of many: the whole is not sent again for it
                try:
                    answer = self._ask("upload_part", Key=key, UploadId=upload, PartNumber=number + 1, Body=body)
                    break
                except Exception as error:
                    if kind_of(error) != "passing" or attempt == PART_ATTEMPTS:
                        raise
                    time.sleep(max(after_s(error), PART_PAUSE_S * 2**attempt * random.uniform(0.5, 1.5)))
            digest = hashlib.md5(body, usedforsecurity=False)
            if is_md5(answer["ETag"]) and answer["ETag"].strip('"') != digest.hexdigest():
                raise Passing(f"the server's checksum of part {number + 1} is another one")
            return answer["ETag"], digest.digest()

        try:
            with ThreadPoolExecutor(PART_THREADS, thread_name_prefix="upload") as pool:
                try:
                    sent = list(pool.map(send, range(-(-size // part))))
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            parts = [{"PartNumber": number + 1, "ETag": etag} for number, (etag, _) in enumerate(sent)]
            answer = self._ask("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException as error:
            try:
                self._ask("abort_multipart_upload", Key=key, UploadId=upload)
            except Exception as second:  # its parts stay until `tidy`
                error.add_note(f"the upload was not given up either: {second}")
            raise
        whole = hashlib.md5(b"".join(digest for _, digest in sent), usedforsecurity=False).hexdigest()
        return self._stored(size, answer["ETag"], f"{whole}-{len(sent)}")

    def _stored(self, size: int, etag: str, wanted: str) -> tuple[ObjectState, bool]:
        """Encrypted buckets have other ETags, which say nothing: those objects are read back by the caller."""
        found = etag.strip('"')
        comparable = re.fullmatch(r"[0-9a-f]{32}(-\d+)?", found) is not None
        return ObjectState(num_bytes=size, version=etag), comparable and found == wanted

    def remove(self, name: str) -> None:
        with told(missing=False):
            self._ask("delete_object", Key=self.prefix + name)

    def tidy(self) -> None:
        with told():
            for one in self._ask("list_multipart_uploads", Prefix=self.prefix).get("Uploads", []):
                self._ask("abort_multipart_upload", Key=one["Key"], UploadId=one["UploadId"])

    def close(self) -> None:
        async def finish() -> None:
            if self.system._s3 is not None:
                await self.system._s3.close()
                self.system._s3 = None

        self._run(finish)

    async def _client(self) -> Any:
        await self.system.set_session()
        return self.system.s3

    def _ask(self, method: str, **fields: Any) -> Any:
        async def ask() -> Any:
            return await getattr(await self._client(), method)(Bucket=self.bucket, **fields)

        return self._run(ask)

    async def _look(self, name: str) -> ObjectState:
        found = await (await self._client()).head_object(Bucket=self.bucket, Key=self.prefix + name)
        return ObjectState(num_bytes=int(found["ContentLength"]), version=found.get("ETag"))

    async def _read(self, name: str, start: int, target: memoryview, state: ObjectState, outcome: Outcome) -> None:
        condition = {"IfMatch": state.version} if state.version else {}
        answer = await (await self._client()).get_object(
            Bucket=self.bucket, Key=self.prefix + name, Range=f"bytes={start}-{start + len(target) - 1}", **condition
        )
        body = answer["Body"]
        try:
            check_range(answer.get("ContentRange") or "", start, len(target), state, answer.get("ETag"))
            await fill(body.read, target, outcome)
        finally:
            body.close()

    async def _list(self, delimiter: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        more: dict[str, str] = {}
        while True:
            answer = await (await self._client()).list_objects_v2(
                Bucket=self.bucket, Prefix=self.prefix, Delimiter=delimiter, **more
            )
            for one in answer.get("CommonPrefixes", ()):
                found[one["Prefix"].removeprefix(self.prefix).rstrip("/")] = None
            for one in answer.get("Contents", ()):
                if not one["Key"].endswith("/"):  # what some tools store for an empty folder
                    found[one["Key"].removeprefix(self.prefix)] = int(one["Size"])
            if not answer.get("IsTruncated"):
                return found
            more = {"ContinuationToken": answer["NextContinuationToken"]}


def is_md5(etag: str) -> bool:
    return re.fullmatch(r'"?[0-9a-f]{32}"?', etag) is not None
