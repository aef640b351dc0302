"""Who runs when: pure decisions about rollouts, with no Ray, no clock and no input or output."""
