"""What a training step holds on every device."""
