"""How wide the convolutions of a stem are. Imports no torch."""


def stem_widths(dim: int, patch: int) -> tuple[int, ...]:
    """Return the channels of the image and of each convolution of a stem, which halve it down to the patches."""
    halvings = patch.bit_length() - 1
    return (3, *(dim // 2**k for k in reversed(range(halvings))))
