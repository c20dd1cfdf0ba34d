"""From ranks to lanes: where units are cut, and which samples each lane gets."""
