-- A compaction rewrites a segment only when that is worth it, and is bounded in bytes.

alter table penstock.segments add column dirty_since timestamptz;
comment on column penstock.segments.dirty_since is
    'Since when it has superseded events that compaction left there because they are few; null: it has none.';

drop function if exists penstock.compact_stream(text);
