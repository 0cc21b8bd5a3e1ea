"""x"""
def stats() -> None:
    """x."""
