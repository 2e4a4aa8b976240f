"""Formatting of byte counts in messages and tables."""


def format_bytes(count: float) -> str:
    """Return a number of bytes in binary units, such as ``1.5 GiB``.

    Examples:
        >>> format_bytes(1536), format_bytes(5 << 20)
        ('1.5 KiB', '5.0 MiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
