-- Notes of what writers have written, each for its target and its database role; and who may follow whom under a name.

alter table penstock.sink_epochs
    add column role text not null default '',
    add column target text not null default '',
    add column query text,
    add column offsets jsonb;
alter table penstock.sink_epochs drop constraint sink_epochs_pkey;
alter table penstock.sink_epochs add primary key (writer, target, role);
comment on table penstock.sink_epochs is 'The last batch that each writer has committed to each of its targets; it and all before it are never written there again.';
comment on column penstock.sink_epochs.writer is 'Name that the option writer gave, or one made of the id of the query.';
comment on column penstock.sink_epochs.epoch is 'Number of the batch.';
comment on column penstock.sink_epochs.jobs is 'Rows of the batch.';
comment on column penstock.sink_epochs.role is 'The database role that writes: two roles that use a name do not meet. Empty: noted before roles were.';
comment on column penstock.sink_epochs.target is 'What is written: a job type (job invoice), a stream (stream orders), or jobs or streams where a column says which.';
comment on column penstock.sink_epochs.query is 'Id of the streaming query, which is in its checkpoint; null: a batch write.';
comment on column penstock.sink_epochs.offsets is 'Up to where the batch had read the sources of the query, in their order, as its checkpoint has it; null: not known.';

drop function if exists penstock.note_epoch(text, bigint, bigint);
drop function if exists penstock.commit_staged(text, bigint, text[], bigint);
drop function if exists penstock.commit_staged_events(text, bigint, text[], bigint);
drop function if exists penstock.discard_staged(text, bigint);
