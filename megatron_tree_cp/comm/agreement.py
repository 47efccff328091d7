"""Agreement of ranks on plans and errors, over a CPU group, before any data collective.

Each rank contributes the digest of its plan, or an error message. `begin` starts the gather and
returns at once, so that it runs one microbatch ahead; `finish` raises the same error on every rank
when some rank reported one or when digests differ. A rank that failed to make its plan still calls
`begin` with its error: that is what keeps its peers from hanging in the next data collective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

_DIGEST_BYTES = 128
_MESSAGE_BYTES = 895
_RECORD_BYTES = 1 + _DIGEST_BYTES + _MESSAGE_BYTES


class AgreementError(RuntimeError):
    """Some rank failed, or ranks hold different plans; the message names the ranks."""


@dataclass(frozen=True)
class PendingAgreement:
    """A started agreement. `finish()` waits for all ranks and raises `AgreementError` alike."""

    records: list[torch.Tensor]
    ranks: list[int]
    work: dist.Work | None

    def finish(self) -> None:
        """Wait for every rank's record; raise if one reports an error or digests differ."""
        if self.work is not None:
            self.work.wait()
        decoded = [_decode(record) for record in self.records]
        errors = [
            f"rank {rank}: {message}"
            for rank, (failed, _, message) in zip(self.ranks, decoded, strict=True)
            if failed
        ]
        if errors:
            raise AgreementError("; ".join(errors))
        digests: dict[str, list[int]] = {}
        for rank, (_, digest, _) in zip(self.ranks, decoded, strict=True):
            digests.setdefault(digest, []).append(rank)
        if len(digests) > 1:
            held = "; ".join(
                f"{digest[:12] or '(none)'} on rank {', '.join(map(str, ranks))}"
                for digest, ranks in digests.items()
            )
            raise AgreementError(
                f"ranks hold different plans: {held}; check that all ranks read the same data "
                "with the same options and package version"
            )


class Agreement:
    """Gathers digests and errors over a CPU (gloo) group; `group=None` checks one rank alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        if group is None:
            self.ranks = [dist.get_rank() if dist.is_initialized() else 0]
        else:
            self.ranks = dist.get_process_group_ranks(group)
            if "gloo" not in dist.get_backend(group):
                raise ValueError(
                    f"agreement needs a gloo group, got {dist.get_backend(group)}; create one with "
                    "torch.distributed.new_group(ranks, backend='gloo')"
                )

    def begin(self, digest: str, error: str | None = None) -> PendingAgreement:
        """Start the gather of this rank's digest, or of its error message (first 895 bytes)."""
        if len(digest.encode()) > _DIGEST_BYTES:
            raise ValueError(f"digest has {len(digest)} characters; at most {_DIGEST_BYTES} fit")
        record = _encode(digest, error)
        if self.group is None:
            return PendingAgreement([record], self.ranks, None)
        records = [torch.empty_like(record) for _ in self.ranks]
        work = dist.all_gather(records, record, group=self.group, async_op=True)
        return PendingAgreement(records, self.ranks, work)


def _encode(digest: str, error: str | None) -> torch.Tensor:
    # Cut by bytes, dropping a split last character, so that the record decodes on every rank.
    message = (error or "").encode()[:_MESSAGE_BYTES].decode(errors="ignore").encode()
    record = bytes([error is not None])
    record += digest.encode().ljust(_DIGEST_BYTES, b"\0") + message.ljust(_MESSAGE_BYTES, b"\0")
    return torch.frombuffer(bytearray(record), dtype=torch.uint8)


def _decode(record: torch.Tensor) -> tuple[bool, str, str]:
    raw = record.numpy().tobytes()
    digest = raw[1 : 1 + _DIGEST_BYTES].rstrip(b"\0").decode()
    message = raw[1 + _DIGEST_BYTES :].rstrip(b"\0").decode()
    return bool(raw[0]), digest, message or "failed without a message"
