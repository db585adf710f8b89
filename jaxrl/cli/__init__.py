"""Command lines: settings, flags and presets."""
