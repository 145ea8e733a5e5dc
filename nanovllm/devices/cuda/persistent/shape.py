"""Which sizes the persistent step serves: what a kernel is compiled for."""

from dataclasses import dataclass
from typing import NamedTuple

from nanovllm.devices.cuda.persistent.sizes import num_slots, power_of_two, q_width, qkv_width

MAX_EXPERTS = 256  # of which a lane of a warp has up to eight
MAX_TOP_K = 32
MIN_SLOTS = 7  # a group of tiles


class ExpertsShape(NamedTuple):
    num_experts: int = 0
    top_k: int = 1
    size: int = 64  # of an expert's MLP
    is_normalized: bool = False  # whether the weights of the chosen sum to one

    def problem(self, bits: int) -> str | None:
        if self.num_experts > MAX_EXPERTS or self.top_k > MAX_TOP_K:
            return f"{self.top_k} of {self.num_experts} experts"
        if self.num_experts > 0 and (self.size % 8 or self.size * bits % 1024):
            return f"experts of {self.size}"
        return None


NO_EXPERTS = ExpertsShape()


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a kernel is compiled for."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int  # of experts: all that a token goes to
    vocab: int
    bits: int = 16  # of all weights but the head's and the router's
    experts: ExpertsShape = NO_EXPERTS

    @property
    def q(self) -> int:
        return int(q_width(self))

    @property
    def qkv(self) -> int:
        return int(qkv_width(self))

    @property
    def numbers(self) -> tuple[int, ...]:
        """All of it: a kernel's parameter can be a tuple, but no record."""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return self.hidden, *heads, self.mlp, self.vocab, self.bits, *self.experts

    @property
    def problem(self) -> str | None:
        """Why there is no kernel for these sizes."""
        group, rest = divmod(self.num_heads, self.num_kv_heads)
        if self.head_dim not in (64, 128):
            return f"heads of {self.head_dim}"
        if rest or group > 8 or self.num_kv_heads > 32:
            return f"{self.num_heads} heads with {self.num_kv_heads} of keys"
        if power_of_two(group) * self.head_dim < 256:  # two threads would hand on the same value
            return f"a kv head for every {group} of {self.head_dim}"
        if problem := self.experts.problem(self.bits):
            return problem
        part = {16: 64, 8: 128, 4: 256}[self.bits]  # of which the copy engine takes whole ones
        if self.hidden % part or self.mlp % part or self.q % part or self.hidden > 8192:
            return f"widths of {self.hidden} and {self.mlp}"
        return None if num_slots(self) >= MIN_SLOTS else "too little shared memory"
