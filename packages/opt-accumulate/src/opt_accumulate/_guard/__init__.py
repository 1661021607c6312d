"""Steps that are not made: spikes, values that are not finite, and the way back."""
