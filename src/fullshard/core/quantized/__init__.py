"""Linear layers with frozen 4-bit and 8-bit weights: formats, the module, and the choice of a model's layers."""

from fullshard.core.quantized.formats import (
    Format as Format,
    format_of as format_of,
    keep_quiet as keep_quiet,
    quantisations as quantisations,
    rounded as rounded,
)
from fullshard.core.quantized.layers import (
    QuantizedLayers as QuantizedLayers,
    adapter_modules as adapter_modules,
    chosen_layers as chosen_layers,
    not_tied as not_tied,
    quantisable as quantisable,
    require_skip as require_skip,
)
from fullshard.core.quantized.linear import QuantizedLinear as QuantizedLinear
