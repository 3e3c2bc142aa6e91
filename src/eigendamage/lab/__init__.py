"""The paper's laboratory: its networks, data sets and experiments."""
