"""From a plan to what ranks execute: instruction lists, and the value that an engine is made of."""
