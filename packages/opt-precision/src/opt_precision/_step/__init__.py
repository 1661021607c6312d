"""One step: the inner update is traced, taken apart, and computed piece by piece."""
