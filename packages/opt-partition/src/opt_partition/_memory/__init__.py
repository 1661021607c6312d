"""Memory of a training step per device."""
