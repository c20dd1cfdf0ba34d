"""A wheel built from the tree installs and runs outside of it, YAML and native module included."""

import contextlib
import fcntl
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
