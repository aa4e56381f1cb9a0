"""Models of other libraries on this package's layers. Each module imports its library only when it is used."""
