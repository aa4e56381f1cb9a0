"""Other libraries' models on this package's layers. Each module imports its library, and is imported by its users."""
