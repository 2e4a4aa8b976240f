"""Formatting of byte counts and durations in messages and tables."""


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


def format_duration(seconds: float) -> str:
    """Return a duration for people.

    Examples:
        >>> format_duration(0.0042), format_duration(42), format_duration(4200)
        ('4.2 ms', '42.0 s', '1 h 10 min')
    """
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
