"""The searched application as a module, for `penstock worker`. SEARCHED_ENCRYPTED says whether its work is encrypted."""

from __future__ import annotations

import os

from penstock import Penstock
from tests.encryption.searched_app import Searched

app = Penstock()
searched = Searched(app, encrypted=os.environ["SEARCHED_ENCRYPTED"] == "1")
