"""What the state of an Optax transformation means."""
