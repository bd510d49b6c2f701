"""Messages by direction: each side decodes only the messages that the other may send."""

from __future__ import annotations

from typing import TypeAlias

from evener.ps.protocol import examination_messages as e
from evener.ps.protocol import messages as m
from evener.ps.protocol import rank_messages as r
from evener.ps.protocol.messages import Invite, Invited, RevokeInvitation

FromNode: TypeAlias = (
    m.Join | m.Profiled | m.Heartbeat | m.Notice | m.Leave | m.Ready | m.NotReady | m.Contribution | m.Validated
    | m.OfferPieces
    | e.Examined | e.Probed | r.RankReady | r.RankSaid | r.RankShown
    | r.RankSaved | r.RankPiece | r.RankEnded
)  # fmt: skip
FromCommand: TypeAlias = (
    m.GetStatus | m.ShutDown | m.ExpelNode | m.ReleaseNode | m.ForgetNode | Invite | RevokeInvitation
    | m.SubmitRun | m.WatchRun | m.StopRun | m.AssignNodes | e.ExamineNodes
)  # fmt: skip
ToMaster: TypeAlias = FromNode | FromCommand | m.FetchBlob | m.BlobChunk
ToNode: TypeAlias = (
    m.Welcome | m.Dismiss | m.GiveNotice | m.Quarantine | m.Heartbeat | m.Prepare | m.ServerReply | m.Validate
    | m.Release | m.FetchBlob | m.BlobChunk | m.FetchFrom | e.Examine | e.ProbeNodes
    | r.PrepareRank | r.StartRank | r.StopRank | r.RankTold
)  # fmt: skip
ToCommand: TypeAlias = (
    m.StatusReply | m.Refused | m.RunAccepted | m.RunRejected | m.RunEvents | m.RunFinished | m.Heartbeat | m.FetchBlob
    | m.BlobChunk | Invited | e.NodesExamined
)  # fmt: skip
