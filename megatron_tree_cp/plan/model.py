"""The shape of a model as far as a plan needs it: layer classes and token-local work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerClass:
    """Layers that share one mask and one head shape.

    Raises ``ValueError`` when a field is out of range.
    """

    name: str
    """Unique name, the key of ``RowPlan.attention`` for attention classes."""

    window: int | None = None
    """Key k is visible only if ``positions[q] - positions[k] < window``; None is unlimited."""

    kind: str = "attention"
    """``attention`` classes get stages and exchanges, ``gdn`` (Gated DeltaNet) classes hand states
    on; other kinds count as token-local work."""

    layers: int = 1
    """Number of layers of this class on this pipeline stage."""

    query_heads: int = 32
    """Query heads before tensor parallelism divides them; of ``gdn`` the key heads."""

    kv_heads: int = 4
    """Key/value heads before tensor parallelism divides them; of ``gdn`` the value heads."""

    head_dim: int = 128
    """Width of a query or key head."""

    value_dim: int | None = None
    """Width of a value head; None means ``head_dim``."""

    conv_width: int = 4
    """Taps of the convolution of a ``gdn`` class."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("LayerClass needs a name")
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"LayerClass {self.name!r}: window must be at least 1 or None, got {self.window}"
            )
        for field in ("layers", "query_heads", "kv_heads", "head_dim", "conv_width"):
            if getattr(self, field) < 1:
                raise ValueError(f"LayerClass {self.name!r}: {field} must be at least 1")
        if self.value_dim is not None and self.value_dim < 1:
            raise ValueError(f"LayerClass {self.name!r}: value_dim must be at least 1 or None")

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def pair_flops(self) -> int:
        """Forward FLOPs of one visible (query, key) pair over all query heads."""
        return 2 * self.query_heads * (self.head_dim + self.value_width)

    @property
    def kv_width(self) -> int:
        """Elements of one token's K and V rows over all KV heads."""
        return self.kv_heads * (self.head_dim + self.value_width)


@dataclass(frozen=True)
class ModelShape:
    """Layer classes and token-local work of one pipeline stage.

    Raises ``ValueError`` for duplicate class names or sizes out of range.
    """

    classes: tuple[LayerClass, ...] = (LayerClass("global"),)
    """The layer classes; several may share a window and then share one attention plan."""

    hidden_size: int = 4096
    """Width of the residual stream."""

    token_flops: float | None = None
    """Forward FLOPs of one token through all token-local work of all layers together (projections,
    MLP, the experts it visits), before tensor parallelism divides it. None derives a dense
    transformer with a gated MLP of 16 hidden^2 FLOPs a layer; 0 plans for attention alone."""

    dtype_bytes: int = 2
    """Bytes of one activation element, also on the wire."""

    activation_bytes: float | None = None
    """Bytes kept for backward per token over all layers; None derives 34 bytes per hidden element
    and layer, times ``dtype_bytes / 2`` (Korthikanti et al., 2022, without the score matrix)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))
        names = [layer.name for layer in self.classes]
        if len(set(names)) != len(names):
            raise ValueError(f"ModelShape: layer class names must differ, got {names}")
        if not names:
            raise ValueError("ModelShape needs at least one LayerClass")
        if self.hidden_size < 1 or self.dtype_bytes < 1:
            raise ValueError("ModelShape: hidden_size and dtype_bytes must be at least 1")
        if self.token_flops is not None and not self.token_flops >= 0:
            raise ValueError("ModelShape: token_flops must be None or at least 0")
        if self.activation_bytes is not None and not self.activation_bytes >= 0:
            raise ValueError("ModelShape: activation_bytes must be None or at least 0")

    @property
    def num_layers(self) -> int:
        """Layers of all classes together."""
        return sum(layer.layers for layer in self.classes)

    @property
    def attention_classes(self) -> tuple[LayerClass, ...]:
        """The classes that get stages and exchanges."""
        return tuple(layer for layer in self.classes if layer.kind == "attention")

    @property
    def recurrent_classes(self) -> tuple[LayerClass, ...]:
        """The Gated DeltaNet classes, whose runs hand states on."""
        return tuple(layer for layer in self.classes if layer.kind == "gdn")

    def total_token_flops(self) -> float:
        """Forward FLOPs of one token's token-local work over all layers."""
        if self.token_flops is not None:
            return float(self.token_flops)
        h = self.hidden_size
        total = 0.0
        for layer in self.classes:
            if layer.kind == "gdn":
                values = layer.kv_heads * layer.value_width
                width = 2 * layer.query_heads * layer.head_dim + 3 * values + 2 * layer.kv_heads
                total += layer.layers * (2 * h * width + 16 * h * h)
                continue
            projections = 2 * h * (layer.query_heads * layer.head_dim + layer.kv_width)
            projections += 2 * h * layer.query_heads * layer.value_width
            total += layer.layers * (projections + 16 * h * h)
        return total

    def total_activation_bytes(self) -> float:
        """Bytes one token keeps for backward over all layers."""
        if self.activation_bytes is not None:
            return float(self.activation_bytes)
        return 17.0 * self.dtype_bytes * self.hidden_size * self.num_layers
