"""From logical axes to devices."""
