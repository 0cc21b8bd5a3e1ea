"""Pictures of stores and runs as self-contained HTML pages, and the plain series that they, and the terminal, show."""
