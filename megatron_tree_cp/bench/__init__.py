"""Labs, workload presets and evidence. Stands above every other room; nothing imports it."""
