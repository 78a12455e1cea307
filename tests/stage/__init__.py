"""What the tests of several rooms need: how they wait, and the surroundings of a node's parts."""
