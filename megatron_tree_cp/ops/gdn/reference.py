"""Reference of the Gated DeltaNet operators: the specification, token by token on a whole row.

Every token continues the token before it on its path. Differentiable by autograd, any float dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

NORM_EPS = 1e-6
"""Added to the squared length of q and k before the root, as FLA and Megatron do."""


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parents: list[int],
    activation: str | None = "silu",
) -> torch.Tensor:
    """Depthwise causal convolution along every path.

    Args:
        x: [T, C], a whole row.
        weight: [C, K]; weight[:, K - 1] multiplies the token itself.
        bias: [C] or None.
        parents: row index of the token before each token on its path, -1 at roots.
        activation: "silu" or None.

    Returns:
        [T, C]
    """
    width = weight.shape[1]
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[0]) if bias is None else bias
        source = t
        for tap in range(width):
            if source < 0:
                break
            total = total + weight[:, width - 1 - tap] * x[source]
            source = parents[source]
        rows.append(total)
    out = torch.stack(rows)
    return F.silu(out) if activation == "silu" else out


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    parents: list[int],
    scale: float,
    use_qk_l2norm: bool = True,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule along every path.

        S' = exp(g) S      d = beta (v - S'^T k)      S = S' + k d^T      y = scale S^T q

    Args:
        q, k: [T, Hk, Dk]; value head h reads key head h * Hk // Hv.
        v: [T, Hv, Dv].
        g: [T, Hv], log of the decay.
        beta: [T, Hv], strength of the write.
        parents: row index of the token before each token on its path, -1 at roots.
        scale: factor of the output.
        use_qk_l2norm: divide every q and k by its length first.
        initial_state: [roots, Hv, Dk, Dv], in row order of the roots; zeros if None.

    Returns:
        y [T, Hv, Dv], and the state after every token [T, Hv, Dk, Dv].
    """
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    group = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    states: list[torch.Tensor] = []
    roots = 0
    for t, parent in enumerate(parents):
        if parent >= 0:
            before = states[parent]
        else:
            zero = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=v.dtype, device=v.device)
            before = zero if initial_state is None else initial_state[roots]
            roots += 1
        decayed = before * torch.exp(g[t])[:, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", decayed, k[t])
        write = torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        states.append(decayed + write)
    after = torch.stack(states)
    return scale * torch.einsum("thkv,thk->thv", after, q), after


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + NORM_EPS) over the last dim."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
