"""Files of flax.optim, TrainState and T5X, and states of older releases of Optax."""
