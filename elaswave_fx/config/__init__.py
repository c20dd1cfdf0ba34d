"""What was asked for: from YAML and overrides to one frozen `Config`, checked once and trusted afterwards."""
