"""Parameter groups: several definitions over one tree of parameters."""
