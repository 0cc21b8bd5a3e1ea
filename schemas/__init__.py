"""The contracts between the parts: configs, the store's manifest, arrow schemas. Importable without torch."""
