"""Publishing a finished run on the Hugging Face Hub: which files are uploaded, and the upload."""

from fullshard.program.sharing.contents import (
    Contents as Contents,
    File as File,
    contents_of as contents_of,
    require_finished as require_finished,
)
from fullshard.program.sharing.hub import (
    Upload as Upload,
    Uploaded as Uploaded,
    require_repo as require_repo,
    upload as upload,
)
from fullshard.program.sharing.push import PushSink as PushSink, push_finished as push_finished
