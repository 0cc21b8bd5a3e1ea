"""The face of dflash: options -> config -> one call into the pipeline -> a table. Only this folder draws."""
