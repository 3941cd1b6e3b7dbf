"""A worker's counters since its start, for its heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

from common.messages import WorkerTotals


@dataclass(slots=True)
class Totals:
    """Counters that the roles add to, on the event loop."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    pushed_blocks: int = 0
    pushed_bytes: int = 0
    push_s: float = 0.0
    failed_steps: int = 0
    out_of_memory: int = 0
    refused_handoffs: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def admitted(self, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Count a prompt's lookup in the prefix cache."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += min(prompt_tokens, cached_tokens)

    def pushed(self, *, blocks: int, num_bytes: int, seconds: float) -> None:
        """Count blocks written to a decode worker."""
        self.pushed_blocks += blocks
        self.pushed_bytes += num_bytes
        self.push_s += seconds

    def verified(self, *, drafted: int, accepted: int) -> None:
        """Count the tokens of a verified draft."""
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted

    def step_failed(self, error: Exception) -> None:
        """Count a pass without results."""
        self.failed_steps += 1
        self.out_of_memory += "OutOfMemory" in type(error).__name__ or isinstance(
            error, MemoryError
        )  # torch's OOM, or the host's

    def as_message(
        self,
        *,
        preemptions: int,
        bad_digests: int,
        expired_jobs: int,
        lost_frames: int,
        malformed: int,
        dead_letters: int,
        forged: int,
        pass_s: float,
    ) -> WorkerTotals:
        """The message, with counters kept elsewhere in the worker."""
        return WorkerTotals(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            pushed_blocks=self.pushed_blocks,
            pushed_bytes=self.pushed_bytes,
            push_s=self.push_s,
            preemptions=preemptions,
            failed_steps=self.failed_steps,
            out_of_memory=self.out_of_memory,
            refused_handoffs=self.refused_handoffs,
            bad_digests=bad_digests,
            expired_jobs=expired_jobs,
            lost_frames=lost_frames,
            malformed=malformed,
            dead_letters=dead_letters,
            forged=forged,
            pass_s=pass_s,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )
