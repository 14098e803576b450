"""A regular package, so that ``tests`` means this folder: verl's wheel installs another one."""
