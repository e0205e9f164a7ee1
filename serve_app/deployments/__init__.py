"""Ray Serve deployments over the rest of the package: the only place, with `cli`, that imports ray."""
